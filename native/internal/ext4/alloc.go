package ext4

import (
	"sync"
	"sync/atomic"
	"syscall"
)

// run is a range of blocks on the device.
type run struct {
	start uint64
	n     uint32
}

// window is space reserved in memory for one file's appends, so that files
// written at the same time do not take turns block by block.
type window struct {
	start uint64
	n     uint32
}

const (
	minWindow  = 16   // blocks
	maxWindow  = 2048 // blocks
	maxWindows = 256  // files that have one
)

// allocator finds blocks and inodes.
//
// A block goes through two steps: reserve promises it in memory only, commit
// takes it in the bitmap, inside the handle that puts it into a file. So data
// can be written between the two and a failure leaves nothing to undo on disk.
type allocator struct {
	mu         sync.Mutex // guards everything here and the mutable part of every group
	freeBlocks uint64
	freeInodes uint64
	windows    map[*Inode]struct{} // inodes whose window is not empty
	dirty      []*group            // groups whose descriptor differs from its buffer
	freed      []freedRun          // given back by transactions that are not committed yet
	released   uint64              // the newest transaction of which that is done
	punch      []run               // to be discarded, then available
	punching   bool                // somebody does that
	punched    sync.Cond           // on mu: punching has become false

	waiting atomic.Int64 // blocks that are free, but not available before the next commit
}

// freedRun is space that the commit of transaction tid makes available. Until
// then it is reserved.
type freedRun struct {
	tid uint64
	run
}

// groupOf gives the group of a block and the block's bit in it.
func (fs *FS) groupOf(blk uint64) (*group, uint32) {
	n := blk - fs.sb.firstDataBlock
	return fs.groups[n/uint64(fs.sb.blocksPerGroup)], uint32(n % uint64(fs.sb.blocksPerGroup))
}

// reserve promises up to want blocks, as near after goal as they come in one
// piece; at least one, or ENOSPC. With i given and appending set, space
// following them is kept for that file's next appends.
func (fs *FS) reserve(goal uint64, want uint32, i *Inode, appending bool) (run, error) {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	if goal < fs.sb.firstDataBlock || goal >= fs.sb.blocksCount {
		goal = fs.sb.firstDataBlock
	}
	if want == 0 || want > fs.sb.blocksPerGroup {
		want = fs.sb.blocksPerGroup
	}
	if i != nil && i.win.n > 0 {
		if goal == i.win.start {
			n := min(want, i.win.n)
			r := run{i.win.start, n}
			i.win.start += uint64(n)
			if i.win.n -= n; i.win.n == 0 {
				delete(a.windows, i)
			}
			return r, nil
		}
		fs.dropWindow(i)
	}
	extra := uint32(0)
	if i != nil && appending {
		if extra = fs.windowSize(i); len(a.windows) >= maxWindows {
			for old := range a.windows {
				fs.dropWindow(old)
				break
			}
		}
	}
	r, err := fs.search(goal, want, extra)
	if err == nil && r.n == 0 && len(a.windows) > 0 {
		for old := range a.windows {
			fs.dropWindow(old)
		}
		r, err = fs.search(goal, want, 0)
	}
	if err != nil {
		return run{}, err
	}
	if r.n == 0 {
		return run{}, syscall.ENOSPC
	}
	fs.markReserved(r, true)
	if r.n > want {
		i.win = window{r.start + uint64(want), r.n - want}
		a.windows[i] = struct{}{}
		r.n = want
	}
	return r, nil
}

// windowSize is what to reserve beyond the next append of i, as large as the
// file within bounds; nothing when space is short. alloc.mu is held.
func (fs *FS) windowSize(i *Inode) uint32 {
	n := uint32(minWindow)
	for n < maxWindow && uint64(n) < uint64(i.sizeHint.Load())>>fs.sb.blockBits {
		n *= 2
	}
	if uint64(n)*64 > fs.alloc.freeBlocks {
		return 0
	}
	return n
}

// search looks for want+extra free blocks in one piece: at goal, then in goal's
// group, then in the others in order. When no piece is that long the longest
// one seen is used. The result has between 1 and want+extra blocks, or none
// when nothing is free. alloc.mu is held.
func (fs *FS) search(goal uint64, want, extra uint32) (run, error) {
	need := want + extra
	first, bit := fs.groupOf(goal)
	if first.free > 0 {
		if err := fs.loadBlockBitmap(first); err != nil {
			return run{}, err
		}
		end := fs.sb.groupBlocks(first.num)
		if e := nextSet(first.blocks.data, first.reserved, bit, min(end, bit+need)); e > bit {
			if e-bit >= min(want, 8) || extra > 0 { // appends take even little, it makes no new extent
				return run{goal, e - bit}, nil
			}
		}
	}
	var best run
	groups := fs.sb.groups
	for k := range groups + 1 { // the goal's group again at the end, for its first part
		g := fs.groups[(first.num+k)%groups]
		if g.free == 0 || g.longest <= best.n || best.n > 0 && g.longest < need && g.longest <= best.n {
			continue
		}
		if err := fs.loadBlockBitmap(g); err != nil {
			return run{}, err
		}
		from := uint32(0)
		if k == 0 {
			from = bit
		}
		start := fs.sb.groupStart(g.num)
		end := fs.sb.groupBlocks(g.num)
		longest := uint32(0)
		for b := nextClear(g.blocks.data, g.reserved, from, end); b < end; {
			e := nextSet(g.blocks.data, g.reserved, b, min(end, b+need))
			if e-b >= need {
				return run{start + uint64(b), need}, nil
			}
			longest = max(longest, e-b)
			if e-b > best.n {
				best = run{start + uint64(b), e - b}
			}
			b = nextClear(g.blocks.data, g.reserved, e, end)
		}
		if k != 0 {
			g.longest = longest
		}
	}
	return best, nil
}

// markReserved sets or clears the promise on r. alloc.mu is held.
func (fs *FS) markReserved(r run, on bool) {
	for r.n > 0 {
		g, bit := fs.groupOf(r.start)
		n := min(r.n, fs.sb.groupBlocks(g.num)-bit)
		if g.reserved == nil {
			g.reserved = make([]byte, fs.sb.blockSize)
		}
		setBits(g.reserved, bit, n, on)
		if !on {
			g.longest = fs.sb.groupBlocks(g.num)
		}
		r.start += uint64(n)
		r.n -= n
	}
}

// dropWindow gives up i's window. alloc.mu is held.
func (fs *FS) dropWindow(i *Inode) {
	if i.win.n > 0 {
		fs.markReserved(run(i.win), false)
		i.win = window{}
	}
	delete(fs.alloc.windows, i)
}

// cancel gives up a reservation.
func (fs *FS) cancel(r run) {
	fs.alloc.mu.Lock()
	fs.markReserved(r, false)
	fs.alloc.mu.Unlock()
}

// commit takes reserved blocks for good.
func (fs *FS) commit(h *handle, r run) error {
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	fs.markReserved(r, false)
	return fs.setBlocks(h, r, true)
}

// allocMeta reserves and commits one block for metadata.
func (fs *FS) allocMeta(h *handle, goal uint64) (uint64, error) {
	r, err := fs.reserve(goal, 1, nil, false)
	if err != nil {
		return 0, err
	}
	return r.start, fs.commit(h, r)
}

// freeMeta frees one metadata block.
func (fs *FS) freeMeta(h *handle, blk uint64) error {
	h.forget(blk)
	return fs.freeBlocks(h, run{blk, 1})
}

// freeBlocks returns blocks to the bitmap. They stay reserved until release says
// that they may be used again.
func (fs *FS) freeBlocks(h *handle, r run) error {
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	if err := fs.setBlocks(h, r, false); err != nil {
		return err
	}
	fs.markReserved(r, true)
	fs.alloc.waiting.Add(int64(r.n))
	h.freed = append(h.freed, r)
	return nil
}

// setBlocks changes bitmap and counts. alloc.mu is held.
func (fs *FS) setBlocks(h *handle, r run, used bool) error {
	if !fs.sb.inData(r.start, uint64(r.n)) {
		return corruptf("blocks %d+%d are outside the volume", r.start, r.n)
	}
	for r.n > 0 {
		g, bit := fs.groupOf(r.start)
		if err := fs.loadBlockBitmap(g); err != nil {
			return err
		}
		n := min(r.n, fs.sb.groupBlocks(g.num)-bit)
		if !allState(g.blocks.data, bit, n, !used) {
			return corruptf("blocks %d+%d: bitmap of group %d disagrees about their use", r.start, n, g.num)
		}
		if err := fs.writeBlockBitmap(h, g); err != nil {
			return err
		}
		setBits(g.blocks.data, bit, n, used)
		if used {
			g.free -= n
			fs.alloc.freeBlocks -= uint64(n)
		} else {
			g.free += n
			fs.alloc.freeBlocks += uint64(n)
			g.longest = fs.sb.groupBlocks(g.num)
		}
		r.start += uint64(n)
		r.n -= n
	}
	return nil
}

// worthDiscarding tells whether freeing r is reason to punch a hole.
func (fs *FS) worthDiscarding(r run) bool {
	const worth = 64 << 10
	return int(r.n)*fs.sb.blockSize >= worth && !fs.noDiscard.Load()
}

// reuse makes freed blocks available. A long run is punched out of the device
// first, in the background. alloc.mu is held.
func (fs *FS) reuse(r run) {
	a := &fs.alloc
	if !fs.worthDiscarding(r) {
		fs.available(r)
		return
	}
	a.punch = append(a.punch, r)
	if !a.punching {
		a.punching = true
		go fs.discard()
	}
}

// available ends the wait of a freed run. alloc.mu is held.
func (fs *FS) available(r run) {
	fs.markReserved(r, false)
	fs.alloc.waiting.Add(-int64(r.n))
}

// discard punches what reuse found. Failure only costs host space.
func (fs *FS) discard() {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.punch) > 0 {
		r := a.punch[0]
		a.punch = a.punch[1:]
		if !fs.noDiscard.Load() && !fs.readOnly.Load() {
			a.mu.Unlock()
			err := fs.dev.Discard(int64(r.start)<<fs.sb.blockBits, int64(r.n)<<fs.sb.blockBits)
			if err != nil {
				fs.noDiscard.Store(true)
			}
			a.mu.Lock()
		}
		fs.available(r)
	}
	a.punch, a.punching = nil, false
	a.punched.Broadcast()
}

// awaitDiscards returns when nothing is being punched.
func (fs *FS) awaitDiscards() {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.punching {
		a.punched.Wait()
	}
}

// allocInode takes a free inode number near its parent. Directories are spread
// over the groups when their parent is the root, so that trees do not crowd.
func (fs *FS) allocInode(h *handle, parent uint32, dir bool) (uint32, error) {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	start := (parent - 1) / fs.sb.inodesPerGroup
	if dir {
		start = fs.dirGroup(parent, start)
	}
	for k := range fs.sb.groups {
		g := fs.groups[(start+k)%fs.sb.groups]
		if g.freeInodes == 0 || g.noInodes {
			continue
		}
		if err := fs.loadInodeBitmap(g); err != nil {
			return 0, err
		}
		from := uint32(0)
		if g.num == 0 { // reserved inodes are never handed out
			from = fs.sb.firstIno - 1
		}
		bit := nextClear(g.inodes.data, nil, from, fs.sb.inodesPerGroup)
		if bit == fs.sb.inodesPerGroup {
			g.noInodes = true
			continue
		}
		return g.num*fs.sb.inodesPerGroup + bit + 1, fs.takeInode(h, g, bit, dir)
	}
	return 0, syscall.ENOSPC
}

// dirGroup chooses the group of a new directory. alloc.mu is held.
func (fs *FS) dirGroup(parent, start uint32) uint32 {
	if parent != rootIno {
		// Beside the parent while the group has a fair share of room.
		g := fs.groups[start]
		if uint64(g.freeInodes)*4 >= fs.alloc.freeInodes/uint64(fs.sb.groups) &&
			uint64(g.free)*4 >= fs.alloc.freeBlocks/uint64(fs.sb.groups) {
			return start
		}
	}
	best := start
	for _, g := range fs.groups {
		b := fs.groups[best]
		if g.freeInodes > 0 && (b.freeInodes == 0 || g.dirs < b.dirs && g.free*2 >= b.free || g.dirs == b.dirs && g.free > b.free) {
			best = g.num
		}
	}
	return best
}

// takeInode marks a free inode used. alloc.mu is held.
func (fs *FS) takeInode(h *handle, g *group, bit uint32, dir bool) error {
	// As the kernel does, a group with inodes in use has a real block bitmap.
	if g.flags&bgBlockUninit != 0 {
		if err := fs.loadBlockBitmap(g); err != nil {
			return err
		}
		if err := fs.writeBlockBitmap(h, g); err != nil {
			return err
		}
	}
	if fs.hasDescCsum() {
		if first := fs.sb.inodesPerGroup - g.unused; bit >= first {
			if err := fs.zeroInodes(h, g, first, bit); err != nil {
				return err
			}
			g.unused = fs.sb.inodesPerGroup - bit - 1
		}
	}
	if err := fs.writeInodeBitmap(h, g); err != nil {
		return err
	}
	setBits(g.inodes.data, bit, 1, true)
	g.freeInodes--
	fs.alloc.freeInodes--
	if dir {
		g.dirs++
	}
	return nil
}

// zeroInodes clears the table from the first never used inode up to bit: an
// uninitialised table may hold anything.
func (fs *FS) zeroInodes(h *handle, g *group, first, bit uint32) error {
	for n := first; n <= bit; n++ {
		blk, off := fs.inodeAddr(g.num*fs.sb.inodesPerGroup + n + 1)
		b, err := h.write(blk)
		if err != nil {
			return err
		}
		clear(b.data[off : off+fs.sb.inodeSize])
	}
	return nil
}

// freeInode gives an inode number back.
func (fs *FS) freeInode(h *handle, ino uint32, dir bool) error {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	g := fs.groups[(ino-1)/fs.sb.inodesPerGroup]
	bit := (ino - 1) % fs.sb.inodesPerGroup
	if err := fs.loadInodeBitmap(g); err != nil {
		return err
	}
	if !testBit(g.inodes.data, bit) {
		return corruptf("inode %d: free already in the bitmap of group %d", ino, g.num)
	}
	if err := fs.writeInodeBitmap(h, g); err != nil {
		return err
	}
	setBits(g.inodes.data, bit, 1, false)
	g.freeInodes++
	g.noInodes = false
	a.freeInodes++
	if dir && g.dirs > 0 {
		g.dirs--
	}
	return nil
}

// inodeUsed tells what the bitmap says about ino.
func (fs *FS) inodeUsed(ino uint32) (bool, error) {
	a := &fs.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	g := fs.groups[(ino-1)/fs.sb.inodesPerGroup]
	if g.flags&bgInodeUninit != 0 {
		return false, nil
	}
	if err := fs.loadInodeBitmap(g); err != nil {
		return false, err
	}
	return testBit(g.inodes.data, (ino-1)%fs.sb.inodesPerGroup), nil
}
