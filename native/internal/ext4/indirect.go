package ext4

// findIndirect maps one file block of an inode without extents (ext2, ext3):
// twelve direct blocks, then one, two and three levels of pointer blocks. The
// result is as find's, with runs that are contiguous on the device joined.
// Such inodes are only read.
func (i *Inode) findIndirect(lblk uint32) (e extent, hole bool, err error) {
	ptrs := i.root()
	per := uint64(i.fs.sb.blockSize / 4)
	at := uint64(lblk)
	if at < 12 {
		return i.pointers(ptrs[:48], lblk, uint32(at), 1)
	}
	at -= 12
	span := uint64(1) // file blocks below one pointer of the block reached
	for level := 0; level < 3; level++ {
		if at >= span*per {
			at -= span * per
			span *= per
			continue
		}
		blk := uint64(le.Uint32(ptrs[48+4*level:]))
		for {
			if blk == 0 {
				return extent{lblk: lblk, n: uint32(span*per - at)}, true, nil
			}
			if !i.fs.sb.inData(blk, 1) {
				return extent{}, false, corruptf("inode %d: pointer block %d is outside the volume", i.ino, blk)
			}
			b, err := i.fs.bufs.read(blk)
			if err != nil {
				return extent{}, false, err
			}
			if span == 1 {
				return i.pointers(b.data, lblk, uint32(at), 1)
			}
			blk = uint64(le.Uint32(b.data[4*(at/span):]))
			at %= span
			span /= per
		}
	}
	return extent{lblk: lblk, n: 1<<32 - 1 - lblk}, true, nil
}

// pointers reads the run that begins at pointer k of a block of pointers.
func (i *Inode) pointers(p []byte, lblk, k, n uint32) (extent, bool, error) {
	first := uint64(le.Uint32(p[4*k:]))
	for int(4*(k+n)) < len(p) {
		v := uint64(le.Uint32(p[4*(k+n):]))
		if first == 0 && v != 0 || first != 0 && v != first+uint64(n) {
			break
		}
		n++
	}
	if first != 0 && !i.fs.sb.inData(first, uint64(n)) {
		return extent{}, false, corruptf("inode %d: file block %d is at %d, outside the volume", i.ino, lblk, first)
	}
	return extent{lblk: lblk, n: n, phys: first}, first == 0, nil
}
