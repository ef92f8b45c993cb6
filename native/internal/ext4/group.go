package ext4

// Offsets in a group descriptor, names as in the format documentation.
const (
	bgBlockBitmapLo  = 0
	bgInodeBitmapLo  = 4
	bgInodeTableLo   = 8
	bgFreeBlocksLo   = 12
	bgFreeInodesLo   = 14
	bgUsedDirsLo     = 16
	bgFlags          = 18
	bgBlockCsumLo    = 24
	bgInodeCsumLo    = 26
	bgItableUnusedLo = 28
	bgChecksum       = 30
	bgBlockBitmapHi  = 32
	bgInodeBitmapHi  = 36
	bgInodeTableHi   = 40
	bgFreeBlocksHi   = 44
	bgFreeInodesHi   = 46
	bgUsedDirsHi     = 48
	bgItableUnusedHi = 50
	bgBlockCsumHi    = 56
	bgInodeCsumHi    = 58

	bgInodeUninit = 1
	bgBlockUninit = 2
	bgInodeZeroed = 4
)

// group is a group descriptor and its bitmaps.
type group struct {
	// Never change.
	num         uint32
	blockBitmap uint64
	inodeBitmap uint64
	inodeTable  uint64
	descBlk     uint64 // where the descriptor is
	descOff     int

	// Guarded by allocator.mu.
	free       uint32
	freeInodes uint32
	dirs       uint32
	unused     uint32 // inodes at the table's end never used
	flags      uint16
	blocks     *buffer // block bitmap, nil until loaded; pinned
	inodes     *buffer // inode bitmap, likewise
	reserved   []byte  // blocks promised to writers in memory; nil when none ever were
	longest    uint32  // no run of free blocks is longer than this
	noInodes   bool    // the inode bitmap was searched and is full
	dirty      bool    // descriptor differs from its buffer; the group is in allocator.dirty
	blocksCsum bool    // block bitmap changed since its checksum was taken
	inodesCsum bool
}

func lohi16(d []byte, lo, hi int) uint32 {
	v := uint32(le.Uint16(d[lo:]))
	if len(d) > hi+1 {
		v |= uint32(le.Uint16(d[hi:])) << 16
	}
	return v
}

func putLohi16(d []byte, lo, hi int, v uint32) {
	le.PutUint16(d[lo:], uint16(v))
	if len(d) > hi+1 {
		le.PutUint16(d[hi:], uint16(v>>16))
	}
}

func lohi32(d []byte, lo, hi int) uint64 {
	v := uint64(le.Uint32(d[lo:]))
	if len(d) > hi+3 {
		v |= uint64(le.Uint32(d[hi:])) << 32
	}
	return v
}

// descBlock is the block of the descriptor table that holds group g's descriptor.
func (sb *super) descBlock(g uint32) uint64 {
	per := uint32(sb.blockSize / sb.descSize)
	n := g / per
	base := sb.firstDataBlock
	if sb.blockSize > superOffset {
		base = 0
	}
	if sb.incompat&incompatMetaBG == 0 || n < sb.firstMetaBG {
		return base + 1 + uint64(n)
	}
	first := n * per
	blk := sb.groupStart(first)
	if sb.hasSuper(first) {
		blk++
	}
	return blk
}

// loadGroups reads and verifies all descriptors.
func (fs *FS) loadGroups() error {
	sb := fs.sb
	fs.groups = make([]*group, sb.groups)
	per := uint32(sb.blockSize / sb.descSize)
	for g := range sb.groups {
		blk := sb.descBlock(g)
		if blk >= sb.blocksCount {
			return corruptf("group %d: descriptor block %d is outside the volume", g, blk)
		}
		b, err := fs.bufs.readPinned(blk)
		if err != nil {
			return err
		}
		off := int(g%per) * sb.descSize
		d := b.data[off : off+sb.descSize]
		if got := fs.descChecksum(g, d); got != le.Uint16(d[bgChecksum:]) && (sb.has(roCompatMetadataCsum) || sb.has(roCompatGDTCsum)) {
			return corruptf("group %d: descriptor checksum %#x, counted %#x", g, le.Uint16(d[bgChecksum:]), got)
		}
		gr := &group{
			num:         g,
			blockBitmap: lohi32(d, bgBlockBitmapLo, bgBlockBitmapHi),
			inodeBitmap: lohi32(d, bgInodeBitmapLo, bgInodeBitmapHi),
			inodeTable:  lohi32(d, bgInodeTableLo, bgInodeTableHi),
			descBlk:     blk,
			descOff:     off,
			free:        lohi16(d, bgFreeBlocksLo, bgFreeBlocksHi),
			freeInodes:  lohi16(d, bgFreeInodesLo, bgFreeInodesHi),
			dirs:        lohi16(d, bgUsedDirsLo, bgUsedDirsHi),
			unused:      lohi16(d, bgItableUnusedLo, bgItableUnusedHi),
			flags:       le.Uint16(d[bgFlags:]),
			longest:     sb.groupBlocks(g),
		}
		if !sb.inData(gr.blockBitmap, 1) || !sb.inData(gr.inodeBitmap, 1) || !sb.inData(gr.inodeTable, sb.inodeTableBlocks()) {
			return corruptf("group %d: bitmaps or inode table outside the volume", g)
		}
		if !fs.hasDescCsum() {
			gr.flags, gr.unused = 0, 0
		}
		if gr.freeInodes > sb.inodesPerGroup || gr.unused > sb.inodesPerGroup || gr.free > sb.groupBlocks(g) && !sb.has(roCompatBigalloc) {
			return corruptf("group %d: counts of free blocks %d, free inodes %d, unused inodes %d", g, gr.free, gr.freeInodes, gr.unused)
		}
		fs.groups[g] = gr
		fs.alloc.freeBlocks += uint64(gr.free)
		fs.alloc.freeInodes += uint64(gr.freeInodes)
	}
	return nil
}

// hasDescCsum tells whether the UNINIT flags and itable_unused mean anything.
func (fs *FS) hasDescCsum() bool {
	return fs.sb.has(roCompatMetadataCsum) || fs.sb.has(roCompatGDTCsum)
}

// blockBitmap loads group g's block bitmap. fs.alloc.mu is held.
func (fs *FS) loadBlockBitmap(g *group) error {
	if g.blocks != nil {
		return nil
	}
	n := fs.sb.groupBlocks(g.num)
	if g.flags&bgBlockUninit != 0 {
		data := make([]byte, fs.sb.blockSize)
		fs.uninitBlockBitmap(g, data)
		if c := countClear(data, n); c != g.free {
			return corruptf("group %d: %d blocks free, %d counted in the uninitialised bitmap", g.num, g.free, c)
		}
		// Not the journal's yet: reservations come here without a handle.
		g.blocks = fs.bufs.put(g.blockBitmap, data, bufPinned)
		return nil
	}
	b, err := fs.readBitmap(g, g.blockBitmap, bgBlockCsumLo, bgBlockCsumHi, fs.sb.blocksPerGroup/8)
	if err != nil {
		return err
	}
	if c := countClear(b.data, n); c != g.free {
		return corruptf("group %d: %d blocks free, %d counted in the bitmap", g.num, g.free, c)
	}
	g.blocks = b
	return nil
}

// readBitmap reads a bitmap of group g and verifies the checksum of its first n
// bytes, which stands in g's descriptor at lo and hi. The buffer is pinned.
func (fs *FS) readBitmap(g *group, blk uint64, lo, hi int, n uint32) (*buffer, error) {
	b, err := fs.bufs.readPinned(blk)
	if err != nil || !fs.sb.has(roCompatMetadataCsum) {
		return b, err
	}
	d, err := fs.bufs.read(g.descBlk)
	if err != nil {
		return nil, err
	}
	if !fs.bitmapCsumOK(d.data[g.descOff:g.descOff+fs.sb.descSize], lo, hi, b.data[:n]) {
		return nil, corruptf("group %d: checksum of the bitmap in block %d", g.num, blk)
	}
	return b, nil
}

// uninitBlockBitmap fills in the bitmap that BLOCK_UNINIT stands for.
func (fs *FS) uninitBlockBitmap(g *group, data []byte) {
	start := fs.sb.groupStart(g.num)
	n := fs.sb.groupBlocks(g.num)
	mark := func(blk, cnt uint64) {
		lo, hi := max(blk, start), min(blk+cnt, start+uint64(n))
		if lo < hi {
			setBits(data, uint32(lo-start), uint32(hi-lo), true)
		}
	}
	mark(start, uint64(fs.sb.baseMeta(g.num)))
	for _, o := range fs.groups {
		mark(o.blockBitmap, 1)
		mark(o.inodeBitmap, 1)
		mark(o.inodeTable, fs.sb.inodeTableBlocks())
	}
	setBits(data, n, uint32(fs.sb.blockSize*8)-n, true)
}

func (fs *FS) bitmapCsumOK(d []byte, lo, hi int, bitmap []byte) bool {
	crc := crc32c(fs.sb.seed, bitmap)
	if len(d) <= hi+1 { // 32-byte descriptors keep the low half only
		return uint16(crc) == le.Uint16(d[lo:])
	}
	return crc == lohi16(d, lo, hi)
}

// loadInodeBitmap loads group g's inode bitmap. fs.alloc.mu is held.
func (fs *FS) loadInodeBitmap(g *group) error {
	if g.inodes != nil {
		return nil
	}
	n := fs.sb.inodesPerGroup
	if g.flags&bgInodeUninit != 0 {
		if g.freeInodes != n {
			return corruptf("group %d: %d inodes free in an uninitialised bitmap", g.num, g.freeInodes)
		}
		data := make([]byte, fs.sb.blockSize)
		setBits(data, n, uint32(fs.sb.blockSize*8)-n, true)
		g.inodes = fs.bufs.put(g.inodeBitmap, data, bufPinned)
		return nil
	}
	b, err := fs.readBitmap(g, g.inodeBitmap, bgInodeCsumLo, bgInodeCsumHi, n/8)
	if err != nil {
		return err
	}
	if c := countClear(b.data, n); c != g.freeInodes {
		return corruptf("group %d: %d inodes free, %d counted in the bitmap", g.num, g.freeInodes, c)
	}
	g.inodes = b
	return nil
}

// writeBlockBitmap gets g's block bitmap, which is loaded, and its descriptor for
// changing. alloc.mu is held.
func (fs *FS) writeBlockBitmap(h *handle, g *group) error {
	if g.blocksCsum { // in this transaction already: storeGroups clears that
		return nil
	}
	if _, err := h.write(g.blockBitmap); err != nil {
		return err
	}
	if err := fs.writeDesc(h, g); err != nil {
		return err
	}
	g.flags &^= bgBlockUninit
	g.blocksCsum = true
	return nil
}

// writeInodeBitmap is writeBlockBitmap of the inode bitmap.
func (fs *FS) writeInodeBitmap(h *handle, g *group) error {
	if g.inodesCsum {
		return nil
	}
	if _, err := h.write(g.inodeBitmap); err != nil {
		return err
	}
	if err := fs.writeDesc(h, g); err != nil {
		return err
	}
	g.flags &^= bgInodeUninit
	g.inodesCsum = true
	return nil
}

// writeDesc gets g's descriptor for changing: storeGroups does that, at the end of
// the transaction.
func (fs *FS) writeDesc(h *handle, g *group) error {
	if g.dirty {
		return nil
	}
	if _, err := h.write(g.descBlk); err != nil {
		return err
	}
	g.dirty = true
	fs.alloc.dirty = append(fs.alloc.dirty, g)
	return nil
}

// storeGroups brings descriptors and bitmap checksums into their buffers. No
// other handle is open.
func (fs *FS) storeGroups(h *handle) error {
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	for _, g := range fs.alloc.dirty {
		b, err := h.write(g.descBlk)
		if err != nil {
			return err
		}
		d := b.data[g.descOff : g.descOff+fs.sb.descSize]
		putLohi16(d, bgFreeBlocksLo, bgFreeBlocksHi, g.free)
		putLohi16(d, bgFreeInodesLo, bgFreeInodesHi, g.freeInodes)
		putLohi16(d, bgUsedDirsLo, bgUsedDirsHi, g.dirs)
		if fs.hasDescCsum() {
			putLohi16(d, bgItableUnusedLo, bgItableUnusedHi, g.unused)
			le.PutUint16(d[bgFlags:], g.flags)
		}
		if fs.sb.has(roCompatMetadataCsum) {
			if g.blocksCsum {
				putLohi16(d, bgBlockCsumLo, bgBlockCsumHi, crc32c(fs.sb.seed, g.blocks.data[:fs.sb.blocksPerGroup/8]))
			}
			if g.inodesCsum {
				putLohi16(d, bgInodeCsumLo, bgInodeCsumHi, crc32c(fs.sb.seed, g.inodes.data[:fs.sb.inodesPerGroup/8]))
			}
		}
		if fs.hasDescCsum() {
			le.PutUint16(d[bgChecksum:], fs.descChecksum(g.num, d))
		}
		g.dirty, g.blocksCsum, g.inodesCsum = false, false, false
	}
	fs.alloc.dirty = fs.alloc.dirty[:0]
	return nil
}
