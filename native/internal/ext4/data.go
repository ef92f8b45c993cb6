package ext4

import (
	"errors"
	"syscall"
)

// ReadAt reads up to len(p) bytes at off; n < len(p) with a nil error at the
// end of file. Holes and unwritten extents read as zeros.
func (i *Inode) ReadAt(p []byte, off int64) (int, error) {
	switch {
	case off < 0:
		return 0, syscall.EINVAL
	case i.isDir():
		return 0, syscall.EISDIR
	}
	i.io.RLock()
	defer i.io.RUnlock()
	return i.readAt(p, off)
}

// readAt is ReadAt with i.io held.
func (i *Inode) readAt(p []byte, off int64) (int, error) {
	size := i.Size()
	if off >= size {
		return 0, nil
	}
	p = p[:min(int64(len(p)), size-off)]
	if data, ok, err := i.inlineData(); err != nil || ok {
		if err != nil {
			return 0, err
		}
		return copy(p, data[off:]), nil
	}
	bits := i.fs.sb.blockBits
	done := 0
	for done < len(p) {
		at := off + int64(done)
		i.mu.RLock()
		e, hole, err := i.find(uint32(at >> bits))
		i.mu.RUnlock()
		if err != nil {
			return done, err
		}
		skip := at & (1<<bits - 1)
		n := int(min(int64(len(p)-done), int64(e.n)<<bits-skip))
		part := p[done : done+n]
		if hole || e.unwritten {
			clear(part)
		} else if _, err := i.fs.dev.ReadAt(part, int64(e.phys)<<bits+skip); err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// writable says why data of the inode cannot be changed, if so.
func (i *Inode) writable() error {
	switch {
	case i.isDir():
		return syscall.EISDIR
	case !i.isRegular():
		return syscall.EINVAL
	}
	i.mu.RLock()
	defer i.mu.RUnlock()
	if !i.hasExtents() {
		return syscall.EOPNOTSUPP
	}
	return nil
}

// WriteAt writes p at off, growing the file; n < len(p) comes with an error
// (ENOSPC, EFBIG …). Times are not changed: call Touch.
func (i *Inode) WriteAt(p []byte, off int64) (int, error) {
	n, err := i.WriteFunc(off, int64(len(p)), func(devOff, fileOff, n int64) error {
		_, err := i.fs.dev.WriteAt(p[fileOff-off:fileOff-off+n], devOff)
		return err
	})
	return int(n), err
}

// WriteFunc is WriteAt with the data stored by the caller: write(devOff,
// fileOff, n) is called for each contiguous piece, in order, and stores n bytes
// at devOff of the device. A piece that fails stays what it was as far as it
// had no storage before. It returns the bytes of the pieces that went well. No
// lock that Extents or Attr take is held during write, but it must not change
// this inode's data by other calls.
func (i *Inode) WriteFunc(off, n int64, write func(devOff, fileOff, n int64) error) (int64, error) {
	if off < 0 || n < 0 {
		return 0, syscall.EINVAL
	}
	if err := i.writable(); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, nil
	}
	if i.fs.ReadOnly() {
		return 0, syscall.EROFS
	}
	limit := i.fs.maxSize()
	if off >= limit {
		return 0, syscall.EFBIG
	}
	var short error
	if n > limit-off {
		n, short = limit-off, syscall.EFBIG
	}
	i.io.Lock()
	defer i.io.Unlock()
	if size := i.Size(); off > size {
		if err := i.cleanTail(size); err != nil {
			return 0, err
		}
	}
	done := int64(0)
	for idle, reclaims := 0, 0; done < n; {
		m, err := i.writePiece(off+done, n-done, write)
		done += m
		if errors.Is(err, syscall.ENOSPC) && reclaims < 2 && i.fs.reclaim() {
			reclaims++
			continue
		}
		if err != nil {
			return done, err
		}
		if idle++; m > 0 {
			idle = 0
		} else if idle > maxRetries {
			return done, syscall.EAGAIN
		}
	}
	return done, short
}

// writePiece writes the first contiguous piece of [off, off+n). i.io is held
// exclusively. It may do nothing when the map changed under it (by Extents).
func (i *Inode) writePiece(off, n int64, write func(devOff, fileOff, n int64) error) (int64, error) {
	bits := i.fs.sb.blockBits
	bs := int64(1) << bits
	lblk := uint32(off >> bits)
	skip := off & (bs - 1)
	i.mu.RLock()
	e, hole, err := i.find(lblk)
	grow := off+min(n, int64(e.n)<<bits-skip) > i.size()
	i.mu.RUnlock()
	if err != nil {
		return 0, err
	}
	switch {
	case hole:
		return i.fillHole(off, n, e, write)
	case e.unwritten:
		return i.fillUnwritten(off, n, e, write)
	}
	n = min(n, int64(e.n)<<bits-skip)
	if err := write(int64(e.phys)<<bits+skip, off, n); err != nil {
		return 0, err
	}
	if grow {
		err = i.grow(off + n)
	}
	return n, err
}

// zeroEdges clears the parts of the blocks [lblk, lblk+m) at phys that the file
// bytes [off, off+n) leave out.
func (i *Inode) zeroEdges(lblk, m uint32, phys uint64, off, n int64) error {
	bits := i.fs.sb.blockBits
	first := int64(lblk) << bits
	last := first + int64(m)<<bits
	base := int64(phys) << bits
	if off > first {
		if err := i.fs.zeroDevice(base, off-first); err != nil {
			return err
		}
	}
	if end := off + n; end < last {
		return i.fs.zeroDevice(base+end-first, last-end)
	}
	return nil
}

// fillHole writes into new blocks: reserve, write, then map them.
func (i *Inode) fillHole(off, n int64, e extent, write func(devOff, fileOff, n int64) error) (int64, error) {
	fs := i.fs
	bits := fs.sb.blockBits
	bs := int64(1) << bits
	skip := off & (bs - 1)
	want := uint32(min((skip+n+bs-1)>>bits, int64(e.n), maxUnwritten))
	goal, appending, err := i.dataGoal(e.lblk)
	if err != nil {
		return 0, err
	}
	r, err := fs.reserve(goal, want, i, appending)
	if err != nil {
		return 0, err
	}
	n = min(n, int64(r.n)<<bits-skip)
	err = i.zeroEdges(e.lblk, r.n, r.start, off, n)
	if err == nil {
		err = write(int64(r.start)<<bits+skip, off, n)
	}
	if err != nil {
		fs.cancel(r)
		return 0, err
	}
	mapped, err := i.mapRun(extent{e.lblk, r.n, r.start, false}, off+n)
	if err != nil || !mapped {
		return 0, err
	}
	return n, nil
}

// mapRun maps reserved blocks into a hole and grows the size to at least size.
// It gives the reservation back and false when the hole is no more.
func (i *Inode) mapRun(e extent, size int64) (bool, error) {
	fs := i.fs
	r := run{e.phys, e.n}
	h, err := fs.begin(dataCredits)
	if err != nil {
		fs.cancel(r)
		return false, err
	}
	i.mu.Lock()
	now, hole, err := i.find(e.lblk)
	if err != nil || !hole || now.n < e.n {
		i.mu.Unlock()
		fs.cancel(r)
		h.end(err)
		return false, err
	}
	if err = i.insertExtent(h, e); err != nil {
		fs.cancel(r)
	} else {
		if size > i.size() {
			i.setSize(size)
		}
		if err = fs.commit(h, r); err == nil {
			err = i.flush(h)
		}
	}
	i.mu.Unlock()
	h.end(err)
	return err == nil, err
}

// fillUnwritten writes into blocks that are allocated and unwritten, then marks
// them written.
func (i *Inode) fillUnwritten(off, n int64, e extent, write func(devOff, fileOff, n int64) error) (int64, error) {
	fs := i.fs
	bits := fs.sb.blockBits
	skip := off & (1<<bits - 1)
	n = min(n, int64(e.n)<<bits-skip)
	m := uint32((skip + n + 1<<bits - 1) >> bits)
	// Extents may want the same blocks meanwhile. It would zero them, over what is
	// being written; filled tells it not to.
	i.mu.Lock()
	now, hole, err := i.find(e.lblk)
	if err != nil || hole || !now.unwritten || now.n < m || now.phys != e.phys {
		i.mu.Unlock()
		return 0, err // changed since: look again
	}
	i.filled = span{uint64(e.lblk), uint64(e.lblk) + uint64(m)}
	err = i.zeroEdges(e.lblk, m, e.phys, off, n)
	i.mu.Unlock()
	if err == nil {
		err = write(int64(e.phys)<<bits+skip, off, n)
	}
	h, herr := fs.begin(dataCredits)
	if err == nil {
		err = herr
	}
	i.mu.Lock()
	i.filled = span{}
	if err == nil {
		if err = i.markWritten(h, e.lblk, m); err == nil {
			if off+n > i.size() {
				i.setSize(off + n)
			}
			err = i.flush(h)
		}
	}
	i.mu.Unlock()
	if herr == nil {
		h.end(err)
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// dataGoal is where file block lblk should go: right behind the block before
// it, and whether that makes it an append.
func (i *Inode) dataGoal(lblk uint32) (goal uint64, appending bool, err error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	var p path
	if err := i.walk(lblk, &p); err != nil {
		return 0, false, err
	}
	leaf := &p.steps[p.depth]
	if leaf.k < 0 {
		return i.blockGoal(), false, nil
	}
	e := getExtent(entry(leaf.b, leaf.k))
	goal = e.phys + uint64(lblk) - uint64(e.lblk)
	if e.end() != uint64(lblk) && uint64(lblk)-e.end() > 1<<15 {
		goal = e.phys + uint64(e.n)
	}
	return goal, e.end() == uint64(lblk) && p.next() == endOfFile, nil
}

// grow sets i_size to size if that is larger.
func (i *Inode) grow(size int64) error {
	h, err := i.fs.begin(inodeCredits)
	if err != nil {
		return err
	}
	i.mu.Lock()
	if size > i.size() {
		i.setSize(size)
		err = i.flush(h)
	}
	i.mu.Unlock()
	h.end(err)
	return err
}

// cleanTail makes the bytes of the last block behind the end of file at size
// zero, in case a mapping left something there. i.io is held exclusively.
func (i *Inode) cleanTail(size int64) error {
	i.mu.Lock()
	dirty := i.tailDirty
	i.tailDirty = false
	i.mu.Unlock()
	bs := i.fs.BlockSize()
	if end := (size + bs - 1) &^ (bs - 1); dirty && size < end {
		return i.zeroRange(size, end)
	}
	return nil
}

// zeroRange writes zeros over what is stored of the file bytes [off, end), in
// place. i.io is held exclusively.
func (i *Inode) zeroRange(off, end int64) error {
	bits := i.fs.sb.blockBits
	for off < end {
		i.mu.RLock()
		e, hole, err := i.find(uint32(off >> bits))
		i.mu.RUnlock()
		if err != nil {
			return err
		}
		skip := off & (1<<bits - 1)
		n := min(end-off, int64(e.n)<<bits-skip)
		if !hole && !e.unwritten {
			if err := i.fs.zeroDevice(int64(e.phys)<<bits+skip, n); err != nil {
				return err
			}
		}
		off += n
	}
	return nil
}

var zeros [64 << 10]byte

// zeroDevice makes [off, off+n) of the device read as zeros: by writing when it
// is short, by punching when it is long and whole blocks.
func (fs *FS) zeroDevice(off, n int64) error {
	bs := fs.BlockSize()
	if n > 4*int64(len(zeros)) && off%bs == 0 && n%bs == 0 {
		if fs.dev.Discard(off, n) == nil {
			return nil
		}
	}
	for n > 0 {
		m := min(n, int64(len(zeros)))
		if _, err := fs.dev.WriteAt(zeros[:m], off); err != nil {
			return err
		}
		off += m
		n -= m
	}
	return nil
}

// Truncate sets the size. Times are not changed.
func (i *Inode) Truncate(size int64) error {
	if size < 0 {
		return syscall.EINVAL
	}
	if err := i.writable(); err != nil {
		return err
	}
	if i.fs.ReadOnly() {
		return syscall.EROFS
	}
	if size > i.fs.maxSize() {
		return syscall.EFBIG
	}
	i.io.Lock()
	defer i.io.Unlock()
	old := i.Size()
	if size > old {
		if err := i.cleanTail(old); err != nil {
			return err
		}
		return i.grow(size)
	}
	bs := i.fs.BlockSize()
	if size%bs != 0 && size < old {
		if err := i.zeroRange(size, (size+bs-1)&^(bs-1)); err != nil {
			return err
		}
	}
	return i.cut(old, size)
}

// cut sets the size from old down to size and frees the blocks behind it. Where
// that may take several transactions the inode is in the orphan list meanwhile, so
// that recovery ends what a crash interrupts. i.io is held exclusively.
func (i *Inode) cut(old, size int64) error {
	fs := i.fs
	bs := fs.BlockSize()
	first := uint64(size+bs-1) >> fs.sb.blockBits
	end := max(uint64(old+bs-1)>>fs.sb.blockBits, first)
	h, err := fs.begin(freeCredits)
	if err != nil {
		return err
	}
	fs.orphanMu.Lock()
	i.mu.Lock()
	i.setSize(size)
	if nodeDepth(i.root()) > 0 { // else four extents at most
		err = i.addOrphan(h)
	}
	orphan := i.orphan
	i.mu.Unlock()
	fs.orphanMu.Unlock()
	i.ReleaseWindow()
	for at := first; ; {
		from := at
		i.mu.Lock()
		if err == nil {
			at, err = i.removeRange(h, from, endOfFile, false)
		}
		done := at == endOfFile
		if done {
			i.pastEnd = false
		}
		if ferr := i.flush(h); err == nil {
			err = ferr
		}
		i.mu.Unlock()
		if done && orphan && err == nil {
			fs.orphanMu.Lock()
			i.mu.RLock()
			named := i.links() > 0
			i.mu.RUnlock()
			if named {
				err = i.removeOrphan(h)
			}
			fs.orphanMu.Unlock()
		}
		stop := end
		if !done {
			stop = max(at, from)
		}
		i.endFreeing(h, from, stop, err)
		if done || err != nil {
			return err
		}
		if h, err = fs.begin(freeCredits); err != nil {
			return err
		}
	}
}

// endFreeing ends a handle that has taken the file blocks [from, to) out of i's
// map. What it freed may be used again after the owner of translations has been told.
func (i *Inode) endFreeing(h *handle, from, to uint64, err error) {
	tid := h.close(err)
	if len(h.freed) > 0 && i.fs.beforeFree != nil {
		bits := i.fs.sb.blockBits
		i.fs.beforeFree(i, int64(from)<<bits, int64(to-from)<<bits)
	}
	i.fs.release(tid, h.freed)
}

// SetSize grows the size to at least size after in-place writes; it never
// shrinks and clears nothing: bytes between the old end and what was written
// must have been obtained by Extents with alloc, or be a hole.
func (i *Inode) SetSize(size int64) error {
	if err := i.writable(); err != nil {
		return err
	}
	if size > i.fs.maxSize() {
		return syscall.EFBIG
	}
	return i.grow(size)
}

// Fallocate is fallocate(2): mode 0 or FallocKeepSize allocates unwritten
// extents, FallocPunchHole (with FallocKeepSize) frees, FallocZeroRange zeroes
// and allocates. Times are not changed.
func (i *Inode) Fallocate(mode uint32, off, n int64) error {
	if off < 0 || n <= 0 {
		return syscall.EINVAL
	}
	if err := i.writable(); err != nil {
		return err
	}
	if i.fs.ReadOnly() {
		return syscall.EROFS
	}
	if off > i.fs.maxSize()-n {
		return syscall.EFBIG
	}
	i.io.Lock()
	defer i.io.Unlock()
	switch mode {
	case 0, FallocKeepSize, FallocZeroRange, FallocZeroRange | FallocKeepSize:
		if mode&FallocZeroRange != 0 {
			if err := i.zeroRange(off, off+n); err != nil {
				return err
			}
		}
		if err := i.preallocate(off, n); err != nil {
			return err
		}
		if size := i.Size(); mode&FallocKeepSize == 0 && off+n > size {
			if err := i.cleanTail(size); err != nil {
				return err
			}
			return i.grow(off + n)
		}
		return nil
	case FallocPunchHole | FallocKeepSize:
		return i.punch(off, n)
	}
	return syscall.EOPNOTSUPP
}

// preallocate fills the holes of [off, off+n) with unwritten extents. What was
// allocated before an error stays. i.io is held exclusively.
func (i *Inode) preallocate(off, n int64) error {
	bits := i.fs.sb.blockBits
	end := uint64(off+n+1<<bits-1) >> bits
	for at := uint64(off) >> bits; at < end; {
		i.mu.RLock()
		e, hole, err := i.find(uint32(at))
		i.mu.RUnlock()
		if err != nil {
			return err
		}
		if !hole {
			at += uint64(e.n)
			continue
		}
		goal, _, err := i.dataGoal(uint32(at))
		if err != nil {
			return err
		}
		err = i.fs.again(func() error {
			r, err := i.fs.reserve(goal, uint32(min(end-at, uint64(e.n), maxUnwritten)), i, false)
			if err == nil {
				_, err = i.mapRun(extent{uint32(at), r.n, r.start, true}, 0)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// punch makes [off, off+n) a hole: partial blocks are zeroed, whole ones freed.
// i.io is held exclusively.
func (i *Inode) punch(off, n int64) error {
	bs := i.fs.BlockSize()
	end := off + n
	first, last := (off+bs-1)&^(bs-1), end&^(bs-1)
	if size := i.Size(); end >= size && size > off { // the block with the end of file may go whole
		last = max(last, (size+bs-1)&^(bs-1))
	}
	if first >= last {
		return i.zeroRange(off, end)
	}
	if err := i.zeroRange(off, first); err != nil {
		return err
	}
	if end > last {
		if err := i.zeroRange(last, end); err != nil {
			return err
		}
	}
	bits := i.fs.sb.blockBits
	for at, stop := uint64(first)>>bits, uint64(last)>>bits; at < stop; {
		h, err := i.fs.begin(freeCredits)
		if err != nil {
			return err
		}
		from := at
		i.mu.Lock()
		at, err = i.removeRange(h, from, stop, false)
		if ferr := i.flush(h); err == nil {
			err = ferr
		}
		i.mu.Unlock()
		i.endFreeing(h, from, max(at, from), err)
		if err != nil {
			return err
		}
	}
	i.ReleaseWindow()
	return nil
}

// Extents tells where the bytes of [off, off+n) are on the device, in order and
// without gaps; off and n are rounded out to whole blocks. With alloc, holes and
// unwritten parts are allocated and zeroed first so that the range can be
// written or mapped in place; the size stays (SetSize). What was allocated behind
// the end of file and is not reached by SetSize goes when the last reference
// does. On ENOSPC what could be allocated is, and the error is returned.
func (i *Inode) Extents(off, n int64, alloc bool) ([]Extent, error) {
	if off < 0 || n < 0 || off > i.fs.maxSize()-n {
		return nil, syscall.EINVAL
	}
	if alloc {
		if err := i.writable(); err != nil {
			return nil, err
		}
		if i.fs.ReadOnly() {
			return nil, syscall.EROFS
		}
	}
	i.mu.RLock()
	inline := i.flags()&flagInlineData != 0
	i.mu.RUnlock()
	if inline {
		return nil, syscall.EOPNOTSUPP
	}
	bits := i.fs.sb.blockBits
	end := uint64(off+n+1<<bits-1) >> bits
	var out []Extent
	for at := uint64(off) >> bits; at < end; {
		var e extent
		var hole bool
		var err error
		if alloc {
			err = i.fs.again(func() error {
				e, err = i.materialise(uint32(at), uint32(min(end-at, maxUnwritten)))
				return err
			})
		} else {
			i.mu.RLock()
			e, hole, err = i.find(uint32(at))
			i.mu.RUnlock()
		}
		if err != nil {
			return nil, err
		}
		m := min(uint64(e.n), end-at)
		x := Extent{FileOff: int64(at) << bits, Len: int64(m) << bits, Hole: hole || e.unwritten}
		if !x.Hole {
			x.DevOff = int64(e.phys) << bits
		}
		if k := len(out) - 1; k >= 0 && out[k].Hole == x.Hole && (x.Hole || out[k].DevOff+out[k].Len == x.DevOff) {
			out[k].Len += x.Len
		} else {
			out = append(out, x)
		}
		at += m
	}
	return out, nil
}

// maxRetries bounds how often an operation starts again because the map changed under it.
const maxRetries = 1000

// materialise gives a written extent that starts at lblk, of at most n blocks,
// making it when there is none.
func (i *Inode) materialise(lblk, n uint32) (extent, error) {
	for range maxRetries {
		e, ok, err := i.tryMaterialise(lblk, n)
		if ok || err != nil {
			return e, err
		}
	}
	return extent{}, syscall.EAGAIN
}

// tryMaterialise is materialise; false when a hole was punched meanwhile.
func (i *Inode) tryMaterialise(lblk, n uint32) (extent, bool, error) {
	i.mu.RLock()
	e, hole, err := i.find(lblk)
	i.mu.RUnlock()
	if err != nil {
		return extent{}, false, err
	}
	var r run
	if hole {
		goal, _, err := i.dataGoal(lblk)
		if err != nil {
			return extent{}, false, err
		}
		if r, err = i.fs.reserve(goal, min(n, e.n), i, false); err != nil {
			return extent{}, false, err
		}
		bits := i.fs.sb.blockBits
		if err := i.fs.zeroDevice(int64(r.start)<<bits, int64(r.n)<<bits); err != nil {
			i.fs.cancel(r)
			return extent{}, false, err
		}
		if _, err := i.mapRun(extent{lblk, r.n, r.start, false}, 0); err != nil {
			return extent{}, false, err
		}
	}
	h, err := i.fs.begin(dataCredits)
	if err != nil {
		return extent{}, false, err
	}
	i.mu.Lock()
	e, hole, err = i.find(lblk)
	if err == nil && !hole && e.unwritten {
		e.n = min(e.n, n)
		if err = i.zeroUnwritten(e); err == nil {
			e.unwritten = false
			if err = i.markWritten(h, e.lblk, e.n); err == nil {
				err = i.flush(h)
			}
		}
	}
	bits := i.fs.sb.blockBits
	size, last := i.size(), int64(lblk)+int64(e.n)
	i.tailDirty = i.tailDirty || last > size>>bits
	i.pastEnd = i.pastEnd || last<<bits >= size+1<<bits
	if i.tailDirty || i.pastEnd {
		i.untidy.Store(true)
	}
	i.mu.Unlock()
	h.end(err)
	return e, !hole, err
}

// zeroUnwritten zeroes the blocks of e except those WriteFunc is filling. i.mu
// is held exclusively.
func (i *Inode) zeroUnwritten(e extent) error {
	bits := i.fs.sb.blockBits
	zero := func(lo, hi uint64) error {
		if lo >= hi {
			return nil
		}
		return i.fs.zeroDevice(int64(e.phys+lo-uint64(e.lblk))<<bits, int64(hi-lo)<<bits)
	}
	lo, hi := uint64(e.lblk), e.end()
	f := i.filled
	if f.hi <= lo || f.lo >= hi {
		return zero(lo, hi)
	}
	if err := zero(lo, f.lo); err != nil {
		return err
	}
	return zero(f.hi, hi)
}

// SeekData is the first offset >= off with data; ENXIO when there is none.
func (i *Inode) SeekData(off int64) (int64, error) { return i.seek(off, true) }

// SeekHole is the first offset >= off in a hole (the end of file counts as one); ENXIO past the end.
func (i *Inode) SeekHole(off int64) (int64, error) { return i.seek(off, false) }

func (i *Inode) seek(off int64, data bool) (int64, error) {
	size := i.Size()
	if off < 0 || off >= size {
		return 0, syscall.ENXIO
	}
	bits := i.fs.sb.blockBits
	if _, inline, err := i.inlineData(); err != nil || inline {
		if !data {
			off = size
		}
		return off, err
	}
	for at := off; at < size; {
		i.mu.RLock()
		e, hole, err := i.find(uint32(at >> bits))
		i.mu.RUnlock()
		if err != nil {
			return 0, err
		}
		if (!hole && !e.unwritten) == data {
			return at, nil
		}
		at = (at>>bits + int64(e.n)) << bits
	}
	if data {
		return 0, syscall.ENXIO
	}
	return size, nil
}

// Readlink gives a symlink's target; EINVAL for others.
func (i *Inode) Readlink() (string, error) {
	if !i.isSymlink() {
		return "", syscall.EINVAL
	}
	i.mu.RLock()
	size := i.size()
	if f := i.flags(); f&(flagExtents|flagInlineData) == 0 && size < lenBlock {
		s := string(i.root()[:size])
		i.mu.RUnlock()
		return s, nil
	}
	i.mu.RUnlock()
	if size > int64(i.fs.sb.blockSize) {
		return "", corruptf("inode %d: symlink of %d bytes", i.ino, size)
	}
	p := make([]byte, size)
	i.io.RLock()
	defer i.io.RUnlock()
	n, err := i.readAt(p, 0)
	return string(p[:n]), err
}

// inlineData gives the contents of an inode that has them inside (never on a
// volume that is written).
func (i *Inode) inlineData() (data []byte, ok bool, err error) {
	if i.fs.sb.incompat&incompatInlineData == 0 {
		return nil, false, nil
	}
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.flags()&flagInlineData == 0 {
		return nil, false, nil
	}
	size := i.size()
	data = append(data, i.root()...)
	more, err := i.inlineXattr()
	if err != nil {
		return nil, true, err
	}
	data = append(data, more...)
	if size > int64(len(data)) {
		return nil, true, corruptf("inode %d: %d bytes of inline data for a size of %d", i.ino, len(data), size)
	}
	return data[:size], true, nil
}
