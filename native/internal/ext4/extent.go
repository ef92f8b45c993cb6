package ext4

import "slices"

// An extent tree: nodes of 12-byte entries behind a 12-byte header. The root
// is i_block, the others are blocks with a checksum tail. Entries of leaves
// (extents) and of inner nodes (indexes) both begin with the first file block
// they cover, so one code stores, splits and removes both. An index always
// carries exactly the first block of what is below it.

const (
	extentMagic   = 0xF30A
	maxDepth      = 5
	maxInitLen    = 32768 // longest written extent
	maxUnwritten  = 32767
	entrySize     = 12
	rootEntries   = 4
	endOfFile     = uint64(1) << 32 // beyond every file block
	maxSeenExtent = 1 << 20         // loops over extents in one handle stop here
)

// extent maps n file blocks from lblk to the device.
type extent struct {
	lblk      uint32
	n         uint32
	phys      uint64
	unwritten bool
}

func (e extent) end() uint64 { return uint64(e.lblk) + uint64(e.n) }

// follows tells whether b continues e in the file and on the device.
func (e extent) joins(b extent) bool {
	limit := uint32(maxInitLen)
	if e.unwritten {
		limit = maxUnwritten
	}
	return e.end() == uint64(b.lblk) && e.phys+uint64(e.n) == b.phys && e.unwritten == b.unwritten && e.n+b.n <= limit
}

func getExtent(p []byte) extent {
	e := extent{
		lblk: le.Uint32(p),
		n:    uint32(le.Uint16(p[4:])),
		phys: uint64(le.Uint16(p[6:]))<<32 | uint64(le.Uint32(p[8:])),
	}
	if e.n > maxInitLen {
		e.n -= maxInitLen
		e.unwritten = true
	}
	return e
}

func putExtent(p []byte, e extent) {
	n := e.n
	if e.unwritten {
		n += maxInitLen
	}
	le.PutUint32(p, e.lblk)
	le.PutUint16(p[4:], uint16(n))
	le.PutUint16(p[6:], uint16(e.phys>>32))
	le.PutUint32(p[8:], uint32(e.phys))
}

func getIndex(p []byte) (lblk uint32, blk uint64) {
	return le.Uint32(p), uint64(le.Uint32(p[4:])) | uint64(le.Uint16(p[8:]))<<32
}

func putIndex(p []byte, lblk uint32, blk uint64) {
	le.PutUint32(p, lblk)
	le.PutUint32(p[4:], uint32(blk))
	le.PutUint16(p[8:], uint16(blk>>32))
	le.PutUint16(p[10:], 0)
}

func nodeEntries(b []byte) int { return int(le.Uint16(b[2:])) }
func nodeDepth(b []byte) int   { return int(le.Uint16(b[6:])) }

// entry is the k-th entry of a node.
func entry(b []byte, k int) []byte { return b[entrySize*(k+1) : entrySize*(k+2)] }

func putNodeHeader(b []byte, entries, max, depth int) {
	le.PutUint16(b, extentMagic)
	le.PutUint16(b[2:], uint16(entries))
	le.PutUint16(b[4:], uint16(max))
	le.PutUint16(b[6:], uint16(depth))
}

// nodeCap is the number of entries of a node at the given level (0 is the root).
func (i *Inode) nodeCap(level int) int {
	if level == 0 {
		return rootEntries
	}
	return (i.fs.sb.blockSize - 12) / entrySize
}

// checkNode verifies header, order and bounds of a node. depth is what it must
// be, -1 for any; first is a bound that its first entry must not be below.
func (i *Inode) checkNode(b []byte, depth int, first uint32) error {
	level := 1
	if len(b) == lenBlock {
		level = 0
	}
	n, d := nodeEntries(b), nodeDepth(b)
	switch {
	case le.Uint16(b) != extentMagic:
		return corruptf("inode %d: extent node without its magic (%#x)", i.ino, le.Uint16(b))
	case int(le.Uint16(b[4:])) > i.nodeCap(level) || n > int(le.Uint16(b[4:])):
		return corruptf("inode %d: extent node of %d entries, at most %d", i.ino, n, le.Uint16(b[4:]))
	case d > maxDepth || depth >= 0 && d != depth:
		return corruptf("inode %d: extent node of depth %d, not %d", i.ino, d, depth)
	case n == 0 && (d > 0 || level > 0):
		return corruptf("inode %d: empty extent node", i.ino)
	}
	next := uint64(first)
	for k := range n {
		p := entry(b, k)
		if d > 0 {
			lblk, blk := getIndex(p)
			if uint64(lblk) < next || !i.fs.sb.inData(blk, 1) {
				return corruptf("inode %d: extent index of file block %d to block %d", i.ino, lblk, blk)
			}
			next = uint64(lblk) + 1
			continue
		}
		e := getExtent(p)
		if uint64(e.lblk) < next || e.n == 0 || e.end() > endOfFile || !i.fs.sb.inData(e.phys, uint64(e.n)) {
			return corruptf("inode %d: extent of %d blocks from file block %d to block %d", i.ino, e.n, e.lblk, e.phys)
		}
		next = e.end()
	}
	return nil
}

// step is one node on the way from the root to a leaf.
type step struct {
	blk uint64 // 0 for the root
	b   []byte
	k   int // entry taken; in the leaf the last one that starts at or before the target, or -1
}

type path struct {
	steps [maxDepth + 1]step
	depth int // steps[depth] is the leaf
}

// readNode reads and verifies an extent block.
func (i *Inode) readNode(blk uint64, depth int, first uint32) ([]byte, error) {
	b, err := i.fs.bufs.read(blk)
	if err != nil {
		return nil, err
	}
	if b.kind.Load() != kindExtent {
		if err := i.checkNode(b.data, depth, first); err != nil {
			return nil, err
		}
		if i.fs.sb.has(roCompatMetadataCsum) {
			crc, tail := extentChecksum(i.seed(), b.data)
			if tail+4 > len(b.data) || crc != le.Uint32(b.data[tail:]) {
				return nil, corruptf("inode %d: checksum of extent block %d", i.ino, blk)
			}
		}
		b.kind.Store(kindExtent)
	} else if nodeDepth(b.data) != depth { // a block reached twice at different levels
		return nil, corruptf("inode %d: extent block %d is of depth %d, not %d", i.ino, blk, nodeDepth(b.data), depth)
	}
	return b.data, nil
}

// search gives the last entry that starts at or before lblk, -1 when none does.
func searchNode(b []byte, lblk uint32) int {
	lo, hi := 0, nodeEntries(b)
	for lo < hi {
		m := (lo + hi) / 2
		if le.Uint32(entry(b, m)) <= lblk {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo - 1
}

// walk goes down to the leaf for lblk. i.mu is held.
func (i *Inode) walk(lblk uint32, p *path) error {
	b := i.root()
	p.depth = nodeDepth(b)
	if p.depth > maxDepth {
		return corruptf("inode %d: extent tree of depth %d", i.ino, p.depth)
	}
	p.steps[0] = step{b: b}
	for l := 0; ; l++ {
		s := &p.steps[l]
		s.k = searchNode(s.b, lblk)
		if l == p.depth {
			return nil
		}
		s.k = max(s.k, 0)
		first, blk := getIndex(entry(s.b, s.k))
		b, err := i.readNode(blk, p.depth-l-1, first)
		if err != nil {
			return err
		}
		p.steps[l+1] = step{blk: blk, b: b}
	}
}

// next is the first file block mapped behind the leaf position of p, endOfFile when none is.
func (p *path) next() uint64 {
	for l := p.depth; l >= 0; l-- {
		s := &p.steps[l]
		if s.k+1 < nodeEntries(s.b) {
			return uint64(le.Uint32(entry(s.b, s.k+1)))
		}
	}
	return endOfFile
}

// find maps one file block: the part of its extent from lblk on, or the hole up
// to the next extent (n saturates). i.mu is held.
func (i *Inode) find(lblk uint32) (e extent, hole bool, err error) {
	if !i.hasExtents() {
		return i.findIndirect(lblk)
	}
	var p path
	if err := i.walk(lblk, &p); err != nil {
		return extent{}, false, err
	}
	leaf := &p.steps[p.depth]
	if leaf.k >= 0 {
		e := getExtent(entry(leaf.b, leaf.k))
		if uint64(lblk) < e.end() {
			skip := lblk - e.lblk
			return extent{lblk, e.n - skip, e.phys + uint64(skip), e.unwritten}, false, nil
		}
	}
	return extent{lblk: lblk, n: uint32(min(p.next()-uint64(lblk), 1<<32-1))}, true, nil
}

// leafExtents decodes the leaf of p.
func (p *path) leafExtents() []extent {
	b := p.steps[p.depth].b
	out := make([]extent, nodeEntries(b), nodeEntries(b)+2)
	for k := range out {
		out[k] = getExtent(entry(b, k))
	}
	return out
}

// joined merges neighbours that touch.
func joined(in []extent) []extent {
	out := in[:0]
	for _, e := range in {
		if n := len(out); n > 0 && out[n-1].joins(e) {
			out[n-1].n += e.n
			continue
		}
		out = append(out, e)
	}
	return out
}

// storeLeaf replaces the leaf of p.
func (i *Inode) storeLeaf(h *handle, p *path, exts []extent) error {
	raw := make([]byte, entrySize*len(exts))
	for k, e := range exts {
		putExtent(raw[entrySize*k:], e)
	}
	var spare []uint64
	if need := i.blocksToStore(p, p.depth, len(exts)); need > 0 {
		if nodeDepth(i.root())+1 > maxDepth && i.rootSplits(p, len(exts)) {
			return corruptf("inode %d: extent tree too deep", i.ino)
		}
		goal := i.blockGoal()
		if len(exts) > 0 {
			goal = exts[0].phys
		}
		for range need {
			blk, err := i.fs.allocMeta(h, goal)
			if err != nil {
				for _, b := range spare {
					if err := i.fs.freeMeta(h, b); err != nil {
						return err
					}
				}
				return err
			}
			spare = append(spare, blk)
		}
		i.addBlocks(int64(need))
	}
	return i.store(h, p, p.depth, raw, &spare)
}

// blocksToStore counts the new blocks that n entries at level need.
func (i *Inode) blocksToStore(p *path, level, n int) int {
	if n <= i.nodeCap(level) {
		return 0
	}
	if level == 0 {
		return 1
	}
	return 1 + i.blocksToStore(p, level-1, nodeEntries(p.steps[level-1].b)+1)
}

// rootSplits tells whether storing n entries in the leaf makes the tree deeper.
func (i *Inode) rootSplits(p *path, n int) bool {
	level := p.depth
	for ; level > 0 && n > i.nodeCap(level); level-- {
		n = nodeEntries(p.steps[level-1].b) + 1
	}
	return level == 0 && n > i.nodeCap(0)
}

// putNode writes a node whole.
func (i *Inode) putNode(h *handle, b []byte, level, depth int, raw []byte) {
	putNodeHeader(b, len(raw)/entrySize, i.nodeCap(level), depth)
	n := copy(b[entrySize:], raw)
	if level == 0 {
		clear(b[entrySize+n : lenBlock])
		return
	}
	end := entrySize * (i.nodeCap(level) + 1)
	clear(b[entrySize+n : end])
	if i.fs.sb.has(roCompatMetadataCsum) {
		crc, tail := extentChecksum(i.seed(), b)
		le.PutUint32(b[tail:], crc)
	}
}

// newNode makes an extent block of spare.
func (i *Inode) newNode(h *handle, spare *[]uint64, depth int, raw []byte) uint64 {
	blk := (*spare)[0]
	*spare = (*spare)[1:]
	b := h.create(blk)
	i.putNode(h, b.data, 1, depth, raw)
	b.kind.Store(kindExtent)
	return blk
}

// store replaces the entries of the node at level of p, splitting it when they
// are too many, and keeps the index above right. The caller flushes the inode.
func (i *Inode) store(h *handle, p *path, level int, raw []byte, spare *[]uint64) error {
	s := &p.steps[level]
	depth := p.depth - level
	if len(raw) <= entrySize*i.nodeCap(level) {
		first := le.Uint32(raw)
		if level == 0 {
			i.putNode(h, s.b, 0, depth, raw)
			return nil
		}
		buf, err := h.write(s.blk)
		if err != nil {
			return err
		}
		i.putNode(h, buf.data, level, depth, raw)
		buf.kind.Store(kindExtent)
		return i.fixIndex(h, p, level-1, first, spare)
	}
	if level == 0 {
		blk := i.newNode(h, spare, depth, raw)
		var idx [entrySize]byte
		putIndex(idx[:], le.Uint32(raw), blk)
		i.putNode(h, s.b, 0, depth+1, idx[:])
		return nil
	}
	n := len(raw) / entrySize
	left := n / 2
	if s.k >= nodeEntries(s.b)-1 { // appending: leave a full node behind
		left = i.nodeCap(level)
	}
	right := i.newNode(h, spare, depth, raw[entrySize*left:])
	buf, err := h.write(s.blk)
	if err != nil {
		return err
	}
	i.putNode(h, buf.data, level, depth, raw[:entrySize*left])
	buf.kind.Store(kindExtent)
	up := &p.steps[level-1]
	above := make([]byte, 0, entrySize*(nodeEntries(up.b)+1))
	above = append(above, up.b[entrySize:entrySize*(nodeEntries(up.b)+1)]...)
	le.PutUint32(above[entrySize*up.k:], le.Uint32(raw))
	var idx [entrySize]byte
	putIndex(idx[:], le.Uint32(raw[entrySize*left:]), right)
	above = slices.Insert(above, entrySize*(up.k+1), idx[:]...)
	return i.store(h, p, level-1, above, spare)
}

// fixIndex gives the entry taken at level of p the key first.
func (i *Inode) fixIndex(h *handle, p *path, level int, first uint32, spare *[]uint64) error {
	s := &p.steps[level]
	if le.Uint32(entry(s.b, s.k)) == first {
		return nil
	}
	raw := slices.Clone(s.b[entrySize : entrySize*(nodeEntries(s.b)+1)])
	le.PutUint32(raw[entrySize*s.k:], first)
	return i.store(h, p, level, raw, spare)
}

// insertExtent maps a hole. i.mu is held exclusively; the caller flushes the inode.
func (i *Inode) insertExtent(h *handle, e extent) error {
	limit := uint32(maxInitLen)
	if e.unwritten {
		limit = maxUnwritten
	}
	for e.n > limit { // one reservation can be a whole group
		part := e
		part.n = limit
		if err := i.insertExtent(h, part); err != nil {
			return err
		}
		e.lblk, e.phys, e.n = e.lblk+limit, e.phys+uint64(limit), e.n-limit
	}
	var p path
	if err := i.walk(e.lblk, &p); err != nil {
		return err
	}
	leaf := &p.steps[p.depth]
	exts := p.leafExtents()
	exts = slices.Insert(exts, leaf.k+1, e)
	if k := leaf.k; k >= 0 && exts[k].end() > uint64(e.lblk) || k+2 < len(exts) && e.end() > uint64(exts[k+2].lblk) {
		return corruptf("inode %d: extents overlap at file block %d", i.ino, e.lblk)
	}
	if err := i.storeLeaf(h, &p, joined(exts)); err != nil {
		return err
	}
	i.addBlocks(int64(e.n))
	return nil
}

// markWritten turns the unwritten part of [lblk, lblk+n) into written extents.
// i.mu is held exclusively; the caller flushes the inode.
func (i *Inode) markWritten(h *handle, lblk, n uint32) error {
	i.reshaped = true
	end := uint64(lblk) + uint64(n)
	for at := uint64(lblk); at < end; {
		var p path
		if err := i.walk(uint32(at), &p); err != nil {
			return err
		}
		k := p.steps[p.depth].k
		exts := p.leafExtents()
		if k < 0 || exts[k].end() <= at {
			at = p.next()
			continue
		}
		e := exts[k]
		stop := min(end, e.end())
		if !e.unwritten {
			at = stop
			continue
		}
		head, tail := uint32(at)-e.lblk, uint32(e.end()-stop)
		parts := make([]extent, 0, 3)
		if head > 0 {
			parts = append(parts, extent{e.lblk, head, e.phys, true})
		}
		parts = append(parts, extent{uint32(at), uint32(stop - at), e.phys + uint64(head), false})
		if tail > 0 {
			parts = append(parts, extent{uint32(stop), tail, e.phys + stop - uint64(e.lblk), true})
		}
		if err := i.storeLeaf(h, &p, joined(slices.Replace(exts, k, k+1, parts...))); err != nil {
			return err
		}
		at = stop
	}
	return nil
}

// removeRange unmaps the file blocks [lo, hi) and frees the device blocks they
// had: all of them, or as many as h has room for. It gives the first file block
// that is left to do, hi when none is; what is done is consistent, also in front of an error. Only
// punching the middle of one extent can need space (ENOSPC). i.mu is held
// exclusively; the caller flushes the inode.
func (i *Inode) removeRange(h *handle, lo, hi uint64, all bool) (uint64, error) {
	// Per extent two bitmaps and their descriptors; besides, once, the nodes on the
	// way and what it takes to free those.
	const perExtent, perNode = 4, 4
	at, last := lo, min(hi, endOfFile)
	for at < last {
		var p path
		if err := i.walk(uint32(at), &p); err != nil {
			return at, err
		}
		most := 1<<16 - 1
		if !all && h.j != nil {
			free := h.j.Room() - freeReserve - perNode*p.depth
			if free < perExtent && at > lo {
				return at, nil
			}
			most = max(free/perExtent, 1)
		}
		next := p.next()
		exts := p.leafExtents()
		kept := make([]extent, 0, len(exts)+1)
		var gone []run
		stop := last
		for _, e := range exts {
			a, z := max(at, uint64(e.lblk)), min(stop, e.end())
			if a < z && len(gone) == most {
				stop = a
			}
			if a >= z || stop == a {
				kept = append(kept, e)
				continue
			}
			if a > uint64(e.lblk) {
				kept = append(kept, extent{e.lblk, uint32(a - uint64(e.lblk)), e.phys, e.unwritten})
			}
			gone = append(gone, run{e.phys + a - uint64(e.lblk), uint32(z - a)})
			if z < e.end() {
				kept = append(kept, extent{uint32(z), uint32(e.end() - z), e.phys + z - uint64(e.lblk), e.unwritten})
			}
		}
		if len(gone) == 0 {
			if next <= at {
				return at, corruptf("inode %d: extent tree out of order at file block %d", i.ino, at)
			}
			at = next
			continue
		}
		var err error
		if len(kept) > 0 {
			err = i.storeLeaf(h, &p, kept)
		} else {
			err = i.dropNode(h, &p, p.depth)
		}
		if err != nil {
			return at, err
		}
		for _, r := range gone {
			i.addBlocks(-int64(r.n))
		}
		if err := i.fs.freeRuns(h, gone, i.isDir()); err != nil {
			return at, err
		}
		if stop < last {
			at = stop
		} else if at = max(at+1, min(next, last)); !all && h.j != nil && !h.room(freeReserve+perExtent) {
			break
		}
	}
	if at < last {
		return at, nil
	}
	return hi, i.shrinkTree(h)
}

// dropNode removes the node at level of p, which has become empty.
func (i *Inode) dropNode(h *handle, p *path, level int) error {
	if level == 0 {
		i.putNode(h, i.root(), 0, 0, nil)
		return nil
	}
	if err := i.fs.freeMeta(h, p.steps[level].blk); err != nil {
		return err
	}
	i.addBlocks(-1)
	up := &p.steps[level-1]
	n := nodeEntries(up.b)
	if n == 1 {
		return i.dropNode(h, p, level-1)
	}
	raw := slices.Clone(up.b[entrySize : entrySize*(n+1)])
	raw = slices.Delete(raw, entrySize*up.k, entrySize*(up.k+1))
	return i.store(h, p, level-1, raw, nil)
}

// shrinkTree pulls the only child of the root up while it fits there.
func (i *Inode) shrinkTree(h *handle) error {
	for {
		b := i.root()
		depth := nodeDepth(b)
		if depth == 0 || nodeEntries(b) != 1 {
			return nil
		}
		first, blk := getIndex(entry(b, 0))
		child, err := i.readNode(blk, depth-1, first)
		if err != nil {
			return err
		}
		n := nodeEntries(child)
		if n > rootEntries {
			return nil
		}
		i.putNode(h, b, 0, depth-1, slices.Clone(child[entrySize:entrySize*(n+1)]))
		if err := i.fs.freeMeta(h, blk); err != nil {
			return err
		}
		i.addBlocks(-1)
	}
}

// initExtents makes an empty extent tree.
func (i *Inode) initExtents() {
	clear(i.root())
	putNodeHeader(i.root(), 0, rootEntries, 0)
	i.setFlags(i.flags() | flagExtents)
}
