package ext4

import (
	"cmp"
	"slices"
	"syscall"
)

// The hash index of a directory: block 0 is its root, behind "." and ".." as
// they look to readers that know no index; inner nodes look like one deleted
// entry. An index entry is a hash and a block: names whose hash is at least that
// are there, up to the next entry's. The lowest bit of a hash says that names of
// the same hash are in the block before, too. The first entry's hash is taken as
// 0 and its place holds limit and count.

const (
	rootInfoAt    = 24 // reserved word, hash version, info length, levels, flags
	rootEntriesAt = 32
	nodeEntriesAt = 8
	indexTail     = 8 // reserved word and checksum
)

// entriesAt is where the index entries of block lblk begin.
func entriesAt(lblk uint32) int {
	if lblk == 0 {
		return rootEntriesAt
	}
	return nodeEntriesAt
}

// indexLimit is the number of entries block lblk has room for.
func (fs *FS) indexLimit(lblk uint32) int {
	n := fs.sb.blockSize - entriesAt(lblk)
	if fs.sb.has(roCompatMetadataCsum) {
		n -= indexTail
	}
	return n / 8
}

func indexCount(b []byte, lblk uint32) int { return int(le.Uint16(b[entriesAt(lblk)+2:])) }

// indexEntry gives hash and block of the k-th entry.
func indexEntry(b []byte, lblk uint32, k int) (hash, blk uint32) {
	at := entriesAt(lblk) + 8*k
	if k > 0 {
		hash = le.Uint32(b[at:])
	}
	return hash, le.Uint32(b[at+4:]) & 0x0fffffff
}

// maxLevels is the largest indirect_levels of a root.
func (fs *FS) maxLevels() int {
	if fs.sb.incompat&incompatLargedir != 0 {
		return 2
	}
	return 1
}

// checkIndexRoot verifies what the rest relies on.
func (i *Inode) checkIndexRoot(b []byte) error {
	switch {
	case i.fs.recLen(b) != dotDotAt || b[6] != 1 || b[dirHeader] != '.' || le.Uint32(b) != i.ino:
		return corruptf("directory %d: index root has no \".\"", i.ino)
	case b[dotDotAt+6] != 2 || string(b[dotDotAt+dirHeader:dotDotAt+dirHeader+2]) != "..":
		return corruptf("directory %d: index root has no \"..\"", i.ino)
	case !i.fs.validIno(le.Uint32(b[dotDotAt:])):
		return corruptf("directory %d: parent %d", i.ino, le.Uint32(b[dotDotAt:]))
	case b[rootInfoAt+5] != 8 || int(b[rootInfoAt+6]) > i.fs.maxLevels():
		return corruptf("directory %d: index root: info of %d bytes, %d levels", i.ino, b[rootInfoAt+5], b[rootInfoAt+6])
	}
	return i.checkIndexNode(b, 0)
}

// checkIndexNode verifies limit and count.
func (i *Inode) checkIndexNode(b []byte, lblk uint32) error {
	at := entriesAt(lblk)
	limit, count := int(le.Uint16(b[at:])), int(le.Uint16(b[at+2:]))
	if limit != i.fs.indexLimit(lblk) || count == 0 || count > limit {
		return corruptf("directory %d: index block %d of %d entries, at most %d", i.ino, lblk, count, limit)
	}
	return nil
}

// indexSum gives an index block's checksum and where its tail is.
func (i *Inode) indexSum(b []byte, lblk uint32) (crc uint32, tail int) {
	at := entriesAt(lblk)
	limit, count := int(le.Uint16(b[at:])), int(le.Uint16(b[at+2:]))
	tail = at + 8*limit
	var zero [4]byte
	crc = crc32c(i.seed(), b[:at+8*count])
	crc = crc32c(crc, b[tail:tail+4])
	return crc32c(crc, zero[:]), tail
}

func (i *Inode) checkIndexSum(b []byte, lblk uint32) error {
	if err := i.checkIndexNode(b, lblk); err != nil {
		return err
	}
	crc, tail := i.indexSum(b, lblk)
	if want := le.Uint32(b[tail+4:]); crc != want {
		return corruptf("directory %d: index block %d: checksum %#x, counted %#x", i.ino, lblk, want, crc)
	}
	return nil
}

// sealIndex sets an index block's checksum.
func (i *Inode) sealIndex(buf *buffer, lblk uint32) {
	buf.kind.Store(kindDirIndex)
	if i.fs.sb.has(roCompatMetadataCsum) {
		crc, tail := i.indexSum(buf.data, lblk)
		le.PutUint32(buf.data[tail+4:], crc)
	}
}

// canIndex tells whether the volume's default hash is one we can count.
func (i *Inode) canIndex() bool {
	_, ok := i.fs.sb.dirHash(i.fs.sb.hashVersion, "")
	return ok
}

// makeIndex turns a directory of one block into an htree of one leaf. i.mu is
// held exclusively.
func (i *Inode) makeIndex(h *handle) error {
	lblks, err := i.growDir(h, 1)
	if err != nil {
		return err
	}
	root, err := i.leafForWrite(h, 0)
	if err != nil {
		return err
	}
	leaf, err := i.newLeaf(h, lblks[0])
	if err != nil {
		return err
	}
	entries, err := i.leafEntries(root.data, 0, 0)
	if err != nil {
		return err
	}
	i.packLeaf(leaf, entries)
	for _, e := range entries {
		i.moved(e.name, lblks[0])
	}
	b := root.data
	clear(b)
	i.fs.putEntry(b, i.ino, dotDotAt, ".", TypeDir)
	i.fs.putEntry(b[dotDotAt:], i.dir.parent, i.fs.sb.blockSize-dotDotAt, "..", TypeDir)
	b[rootInfoAt+4] = i.fs.sb.hashVersion
	b[rootInfoAt+5] = 8
	le.PutUint16(b[rootEntriesAt:], uint16(i.fs.indexLimit(0)))
	le.PutUint16(b[rootEntriesAt+2:], 1)
	le.PutUint32(b[rootEntriesAt+4:], lblks[0])
	i.setFlags(i.flags() | flagIndex)
	i.sealIndex(root, 0)
	i.dir.room = nil
	return nil
}

// hashedEntry is an entry on the move between leaves.
type hashedEntry struct {
	hash uint32
	ino  uint32
	typ  uint8
	name string
}

// leafEntries decodes a leaf with hashes, "." and ".." left out.
func (i *Inode) leafEntries(b []byte, lblk uint32, version uint8) ([]hashedEntry, error) {
	var out []hashedEntry
	end := i.fs.leafEnd()
	for off := 0; off < end; {
		n, err := i.nextEntry(b, off, end, lblk)
		if err != nil {
			return nil, err
		}
		if ino := le.Uint32(b[off:]); ino != 0 {
			name := string(b[off+dirHeader : off+dirHeader+int(b[off+6])])
			if name != "." && name != ".." {
				hash, ok := i.fs.sb.dirHash(version, name)
				if !ok {
					return nil, corruptf("directory %d: hash version %d", i.ino, version)
				}
				out = append(out, hashedEntry{hash, ino, b[off+7], name})
			}
		}
		off += n
	}
	return out, nil
}

// packLeaf fills a leaf with entries, without gaps.
func (i *Inode) packLeaf(buf *buffer, entries []hashedEntry) {
	b := buf.data
	end := i.fs.leafEnd()
	clear(b)
	off := 0
	for k, e := range entries {
		n := recLenNeeded(len(e.name))
		if k == len(entries)-1 {
			n = end - off
		}
		i.fs.putEntry(b[off:], e.ino, n, e.name, e.typ)
		off += n
	}
	if len(entries) == 0 {
		i.fs.putEntry(b, 0, end, "", 0)
	}
	i.sealLeaf(buf)
}

// moved records that an entry is in another block now.
func (i *Inode) moved(name string, lblk uint32) {
	if e := i.dir.names[name]; e != nil {
		e.lblk = lblk
	}
}

// indexStep is one index block on the way to a leaf.
type indexStep struct {
	lblk  uint32
	b     []byte
	k     int // entry taken
	count int
}

// probe goes down the index to the leaf for a hash.
func (i *Inode) probe(hash uint32) (steps []indexStep, leaf uint32, err error) {
	lblk := uint32(0)
	levels := 0
	for l := 0; ; l++ {
		buf, err := i.dirBlock(lblk)
		if err != nil {
			return nil, 0, err
		}
		b := buf.data
		if l == 0 {
			if err := i.checkIndexRoot(b); err != nil {
				return nil, 0, err
			}
			levels = int(b[rootInfoAt+6])
		} else {
			if !i.isIndexNode(b, lblk) {
				return nil, 0, corruptf("directory %d: index points to leaf %d at level %d", i.ino, lblk, l)
			}
			if err := i.checkIndexNode(b, lblk); err != nil {
				return nil, 0, err
			}
		}
		s := indexStep{lblk: lblk, b: b, count: indexCount(b, lblk)}
		lo, hi := 1, s.count
		for lo < hi {
			m := (lo + hi) / 2
			if at, _ := indexEntry(b, lblk, m); at > hash {
				hi = m
			} else {
				lo = m + 1
			}
		}
		s.k = lo - 1
		_, next := indexEntry(b, lblk, s.k)
		if next == 0 || next >= i.dir.blocks {
			return nil, 0, corruptf("directory %d: index points to block %d of %d", i.ino, next, i.dir.blocks)
		}
		steps = append(steps, s)
		if l == levels {
			return steps, next, nil
		}
		lblk = next
	}
}

// addIndexed puts an entry into the leaf of its hash, splitting as needed.
func (i *Inode) addIndexed(h *handle, name string, ino uint32, typ uint8) (uint32, error) {
	root, err := i.dirBlock(0)
	if err != nil {
		return 0, err
	}
	version := root.data[rootInfoAt+4]
	hash, ok := i.fs.sb.dirHash(version, name)
	if !ok {
		return 0, syscall.EOPNOTSUPP
	}
	steps, lblk, err := i.probe(hash)
	if err != nil {
		return 0, err
	}
	if b, err := i.dirBlock(lblk); err != nil {
		return 0, err
	} else if i.isIndexNode(b.data, lblk) && i.fs.sb.has(roCompatMetadataCsum) {
		return 0, corruptf("directory %d: index points to index block %d as to a leaf", i.ino, lblk)
	}
	buf, err := i.leafForWrite(h, lblk)
	if err != nil {
		return 0, err
	}
	if done, _, err := i.insertInLeaf(buf, lblk, name, ino, typ); done || err != nil {
		return lblk, err
	}
	return i.splitLeaf(h, steps, lblk, version, hashedEntry{hash, ino, typ, name})
}

// splitLeaf moves the upper half of a full leaf to a new one and puts e where it
// belongs. All blocks are had before anything changes.
func (i *Inode) splitLeaf(h *handle, steps []indexStep, lblk uint32, version uint8, e hashedEntry) (uint32, error) {
	need, err := i.indexBlocksNeeded(steps)
	if err != nil {
		return 0, err
	}
	old, err := i.dirBlock(lblk)
	if err != nil {
		return 0, err
	}
	entries, err := i.leafEntries(old.data, lblk, version)
	if err != nil {
		return 0, err
	}
	spare, err := i.growDir(h, 1+need)
	if err != nil {
		return 0, err
	}
	entries = append(entries, e)
	slices.SortStableFunc(entries, func(a, b hashedEntry) int { return cmp.Compare(a.hash, b.hash) })
	// Split where the lower part first reaches half of the bytes. Each part fits:
	// the whole is at most one entry more than a block.
	total, cut := 0, 0
	for _, x := range entries {
		total += recLenNeeded(len(x.name))
	}
	for n := 0; cut < len(entries)-1 && (cut == 0 || n+recLenNeeded(len(entries[cut].name)) <= total/2); cut++ {
		n += recLenNeeded(len(entries[cut].name))
	}
	border := entries[cut].hash
	if entries[cut-1].hash == border {
		border |= 1
	}
	right := spare[0]
	spare = spare[1:]
	low, err := i.leafForWrite(h, lblk)
	if err != nil {
		return 0, err
	}
	high, err := i.newLeaf(h, right)
	if err != nil {
		return 0, err
	}
	i.packLeaf(low, entries[:cut])
	i.packLeaf(high, entries[cut:])
	at := lblk
	for k, x := range entries {
		switch {
		case k < cut:
		case x.name == e.name:
			at = right
		default:
			i.moved(x.name, right)
		}
	}
	return at, i.insertIndex(h, steps, len(steps)-1, border, right, &spare)
}

// indexBlocksNeeded counts the index blocks that one more entry at the bottom
// takes; ENOSPC when the index cannot grow.
func (i *Inode) indexBlocksNeeded(steps []indexStep) (int, error) {
	n := 0
	for l := len(steps) - 1; l >= 0; l-- {
		if steps[l].count < i.fs.indexLimit(steps[l].lblk) {
			return n, nil
		}
		if l == 0 && len(steps) > i.fs.maxLevels() {
			return 0, syscall.ENOSPC
		}
		n++
	}
	return n, nil
}

// newIndex makes block lblk an inner index node of the given raw entries.
func (i *Inode) newIndex(h *handle, lblk uint32, raw []byte) error {
	phys, err := i.dirPhys(lblk)
	if err != nil {
		return err
	}
	buf := h.create(phys)
	i.fs.putEntry(buf.data, 0, i.fs.sb.blockSize, "", 0)
	i.putIndexEntries(buf, lblk, raw)
	return nil
}

// putIndexEntries replaces the entries of an index block. The first one's hash
// gives way to limit and count.
func (i *Inode) putIndexEntries(buf *buffer, lblk uint32, raw []byte) {
	at := entriesAt(lblk)
	limit := i.fs.indexLimit(lblk)
	n := copy(buf.data[at:], raw)
	clear(buf.data[at+n : at+8*limit])
	le.PutUint16(buf.data[at:], uint16(limit))
	le.PutUint16(buf.data[at+2:], uint16(len(raw)/8))
	i.sealIndex(buf, lblk)
}

// insertIndex adds an entry behind the one taken at level l, splitting full
// nodes and deepening the root with blocks of spare.
func (i *Inode) insertIndex(h *handle, steps []indexStep, l int, hash, blk uint32, spare *[]uint32) error {
	s := &steps[l]
	buf, err := i.leafForWrite(h, s.lblk)
	if err != nil {
		return err
	}
	at := entriesAt(s.lblk)
	raw := slices.Clone(buf.data[at : at+8*s.count])
	le.PutUint32(raw, 0)
	var e [8]byte
	le.PutUint32(e[:], hash)
	le.PutUint32(e[4:], blk)
	raw = slices.Insert(raw, 8*(s.k+1), e[:]...)
	if len(raw) <= 8*i.fs.indexLimit(s.lblk) {
		i.putIndexEntries(buf, s.lblk, raw)
		return nil
	}
	node := (*spare)[0]
	*spare = (*spare)[1:]
	if l == 0 { // the root's entries move down a level
		if err := i.newIndex(h, node, raw); err != nil {
			return err
		}
		buf.data[rootInfoAt+6]++
		var only [8]byte
		le.PutUint32(only[4:], node)
		i.putIndexEntries(buf, s.lblk, only[:])
		return nil
	}
	half := len(raw) / 16 * 8
	border := le.Uint32(raw[half:])
	if err := i.newIndex(h, node, raw[half:]); err != nil {
		return err
	}
	i.putIndexEntries(buf, s.lblk, raw[:half])
	return i.insertIndex(h, steps, l-1, border, node, spare)
}
