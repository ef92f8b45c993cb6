package ext4

import (
	"sort"
	"strings"
	"syscall"
)

// Directories.
//
// A directory that is used is held whole: a map from name to entry, and the
// entries in an order that never changes while it is held, which makes ReadDir's
// cookies stable. On disk only the block of an entry is remembered; its place
// in there is found by scanning. dir.go knows blocks of entries, htree.go the
// index over them.

const (
	tailSize   = 12 // the fake entry with the checksum at a leaf's end
	tailMark   = 0xDE
	dirHeader  = 8 // bytes of an entry before its name
	dotDotAt   = 12
	minRecLen  = 12
	maxRecLen  = 65532
	typeTailIn = 0
)

// dirent is one entry of a held directory; guarded by the directory's mu.
type dirent struct {
	name string
	ino  uint32
	lblk uint32 // block of the directory it is in
	seq  int64  // place in the order; cookies are seq of the next one
	typ  uint8
	dead bool // removed, but still in order
}

// dirCache is a directory in memory; guarded by the directory's mu.
type dirCache struct {
	names  map[string]*dirent
	order  []*dirent // by seq
	dead   int       // removed entries in order
	seq    int64     // of the next entry
	parent uint32    // ".."
	blocks uint32
	room   []uint16 // of a linear directory, an upper bound of each block's largest gap / 4
}

func recLenNeeded(nameLen int) int { return (dirHeader + nameLen + 3) &^ 3 }

// recLen decodes rec_len: blocks of 64 KiB do not fit 16 bits.
func (fs *FS) recLen(b []byte) int {
	v := int(le.Uint16(b[4:]))
	if fs.sb.blockSize < 65536 {
		return v
	}
	if v == 65535 || v == 0 {
		return fs.sb.blockSize
	}
	return v&^3 | v&3<<16
}

func (fs *FS) putRecLen(b []byte, n int) {
	if n > maxRecLen && fs.sb.blockSize == 65536 {
		n = 65535
	}
	le.PutUint16(b[4:], uint16(n))
}

// leafEnd is where a leaf's entries end.
func (fs *FS) leafEnd() int {
	if fs.sb.has(roCompatMetadataCsum) {
		return fs.sb.blockSize - tailSize
	}
	return fs.sb.blockSize
}

// putEntry writes an entry's header and name.
func (fs *FS) putEntry(b []byte, ino uint32, recLen int, name string, typ uint8) {
	le.PutUint32(b, ino)
	fs.putRecLen(b, recLen)
	b[6] = uint8(len(name))
	b[7] = 0
	if fs.sb.incompat&incompatFiletype != 0 {
		b[7] = typ
	}
	copy(b[dirHeader:], name)
}

// nextEntry checks the entry at off of a leaf whose entries end at end and
// gives its length.
func (i *Inode) nextEntry(b []byte, off, end int, lblk uint32) (int, error) {
	if end-off < dirHeader {
		return 0, corruptf("directory %d: entry at %d of block %d runs over the end", i.ino, off, lblk)
	}
	n := i.fs.recLen(b[off:])
	if n < dirHeader || n%4 != 0 || n > end-off || recLenNeeded(int(b[off+6])) > n {
		return 0, corruptf("directory %d: entry at %d of block %d: length %d, name of %d", i.ino, off, lblk, n, b[off+6])
	}
	return n, nil
}

// hasIndex tells whether the directory is an htree. i.mu is held.
func (i *Inode) hasIndex() bool {
	return i.flags()&flagIndex != 0 && i.fs.sb.compat&compatDirIndex != 0
}

// isIndexNode tells whether block lblk of an htree directory is part of the
// index: the root, or one fake entry over the whole block.
func (i *Inode) isIndexNode(b []byte, lblk uint32) bool {
	return lblk == 0 || le.Uint32(b) == 0 && i.fs.recLen(b) == i.fs.sb.blockSize
}

// dirBlock reads and verifies block lblk of the directory. i.mu is held.
func (i *Inode) dirBlock(lblk uint32) (*buffer, error) {
	phys, err := i.dirPhys(lblk)
	if err != nil {
		return nil, err
	}
	b, err := i.fs.bufs.read(phys)
	if err != nil || b.kind.Load() != kindNone {
		return b, err
	}
	kind := uint32(kindDirLeaf)
	if i.hasIndex() && i.isIndexNode(b.data, lblk) {
		kind = kindDirIndex
	}
	if i.fs.sb.has(roCompatMetadataCsum) {
		if kind == kindDirIndex {
			err = i.checkIndexSum(b.data, lblk)
		} else {
			err = i.checkLeafSum(b.data, lblk)
		}
		if err != nil {
			return nil, err
		}
	}
	b.kind.Store(kind)
	return b, nil
}

// dirPhys maps a block of the directory.
func (i *Inode) dirPhys(lblk uint32) (uint64, error) {
	e, hole, err := i.find(lblk)
	if err != nil {
		return 0, err
	}
	if hole || e.unwritten {
		return 0, corruptf("directory %d: block %d is a hole", i.ino, lblk)
	}
	return e.phys, nil
}

func (i *Inode) checkLeafSum(b []byte, lblk uint32) error {
	t := b[len(b)-tailSize:]
	if le.Uint32(t) != 0 || le.Uint16(t[4:]) != tailSize || t[6] != 0 || t[7] != tailMark {
		return corruptf("directory %d: block %d has no checksum tail", i.ino, lblk)
	}
	if got, want := crc32c(i.seed(), b[:len(b)-tailSize]), le.Uint32(t[8:]); got != want {
		return corruptf("directory %d: block %d: checksum %#x, counted %#x", i.ino, lblk, want, got)
	}
	return nil
}

// sealLeaf sets a leaf's tail and checksum.
func (i *Inode) sealLeaf(buf *buffer) {
	b := buf.data
	buf.kind.Store(kindDirLeaf)
	if !i.fs.sb.has(roCompatMetadataCsum) {
		return
	}
	t := b[len(b)-tailSize:]
	le.PutUint32(t, 0)
	le.PutUint16(t[4:], tailSize)
	t[6], t[7] = 0, tailMark
	le.PutUint32(t[8:], crc32c(i.seed(), b[:len(b)-tailSize]))
}

// openDir makes sure the directory is held in memory. i.mu is held exclusively.
func (i *Inode) openDir() error {
	if i.dir != nil {
		return nil
	}
	if !i.isDir() {
		return syscall.ENOTDIR
	}
	if i.flags()&flagInlineData != 0 {
		return i.openInlineDir()
	}
	bs := int64(i.fs.sb.blockSize)
	if i.size()%bs != 0 || i.size() == 0 || i.size()>>i.fs.sb.blockBits > 1<<31 {
		return corruptf("directory %d: size %d", i.ino, i.size())
	}
	d := &dirCache{names: map[string]*dirent{}, blocks: uint32(i.size() >> i.fs.sb.blockBits), seq: 1}
	indexed := i.hasIndex()
	for lblk := range d.blocks {
		buf, err := i.dirBlock(lblk)
		if err != nil {
			return err
		}
		b := buf.data
		if indexed && i.isIndexNode(b, lblk) {
			if lblk == 0 {
				if err := i.checkIndexRoot(b); err != nil {
					return err
				}
				d.parent = le.Uint32(b[dotDotAt:])
			}
			continue
		}
		room, err := i.readLeaf(d, b, lblk)
		if err != nil {
			return err
		}
		if !indexed {
			d.room = append(d.room, uint16(room/4))
		}
	}
	if d.parent == 0 {
		return corruptf("directory %d: no \"..\"", i.ino)
	}
	i.dir = d
	return nil
}

// readLeaf takes the entries of one block into d and gives the largest gap.
func (i *Inode) readLeaf(d *dirCache, b []byte, lblk uint32) (room int, err error) {
	end := i.fs.leafEnd()
	for off := 0; off < end; {
		n, err := i.nextEntry(b, off, end, lblk)
		if err != nil {
			return 0, err
		}
		ino, name := le.Uint32(b[off:]), string(b[off+dirHeader:off+dirHeader+int(b[off+6])])
		switch {
		case ino == 0:
			room = max(room, n)
		case lblk == 0 && off == 0:
			if name != "." || ino != i.ino {
				return 0, corruptf("directory %d: first entry is %q of inode %d, not \".\"", i.ino, name, ino)
			}
			room = max(room, n-minRecLen)
		default:
			room = max(room, n-recLenNeeded(len(name)))
			if err := i.addRead(d, name, ino, b[off+7], lblk); err != nil {
				return 0, err
			}
		}
		off += n
	}
	return room, nil
}

// addRead takes one entry read from disk into d.
func (i *Inode) addRead(d *dirCache, name string, ino uint32, typ uint8, lblk uint32) error {
	if !i.fs.validIno(ino) {
		return corruptf("directory %d: entry %q names inode %d", i.ino, name, ino)
	}
	if name == ".." {
		d.parent = ino
		return nil
	}
	if name == "" || name == "." || strings.ContainsAny(name, "/\x00") {
		return corruptf("directory %d: block %d has an entry named %q", i.ino, lblk, name)
	}
	if d.names[name] != nil {
		return corruptf("directory %d: two entries named %q", i.ino, name)
	}
	if i.fs.sb.incompat&incompatFiletype == 0 || typ > TypeSymlink {
		typ = TypeUnknown
	}
	d.add(name, ino, typ, lblk)
	return nil
}

// openInlineDir holds a directory whose entries are in the inode (inline_data;
// never written): the parent's number, then entries without "." and "..", going
// on in the system.data attribute.
func (i *Inode) openInlineDir() error {
	d := &dirCache{names: map[string]*dirent{}, seq: 1, parent: le.Uint32(i.root())}
	more, err := i.inlineXattr()
	if err != nil {
		return err
	}
	for _, b := range [][]byte{i.root()[4:], more} {
		for off := 0; off < len(b); {
			n, err := i.nextEntry(b, off, len(b), 0)
			if err != nil {
				return err
			}
			if ino := le.Uint32(b[off:]); ino != 0 {
				name := string(b[off+dirHeader : off+dirHeader+int(b[off+6])])
				if err := i.addRead(d, name, ino, b[off+7], 0); err != nil {
					return err
				}
			}
			off += n
		}
	}
	if !i.fs.validIno(d.parent) {
		return corruptf("directory %d: parent %d", i.ino, d.parent)
	}
	i.dir = d
	return nil
}

// add puts an entry into the memory of the directory.
func (d *dirCache) add(name string, ino uint32, typ uint8, lblk uint32) {
	e := &dirent{name: name, ino: ino, typ: typ, lblk: lblk, seq: d.seq}
	d.seq++
	d.names[name] = e
	d.order = append(d.order, e)
}

// remove takes an entry out of the memory of the directory.
func (d *dirCache) remove(e *dirent) {
	delete(d.names, e.name)
	e.dead = true
	d.dead++
	if d.dead > 64 && d.dead > len(d.order)/2 {
		kept := make([]*dirent, 0, len(d.order)-d.dead+16)
		for _, o := range d.order {
			if !o.dead {
				kept = append(kept, o)
			}
		}
		d.order, d.dead = kept, 0
	}
}

// lockDir takes i.mu shared with the directory held in memory; the caller
// releases it with i.mu.RUnlock unless an error is given.
func (i *Inode) lockDir() error {
	i.mu.RLock()
	for i.dir == nil {
		i.mu.RUnlock()
		i.mu.Lock()
		err := i.openDir()
		i.mu.Unlock()
		if err != nil {
			return err
		}
		i.mu.RLock()
	}
	return nil
}

// checkName says why a name cannot exist, if so.
func checkName(name string) error {
	switch {
	case len(name) > MaxNameLen:
		return syscall.ENAMETOOLONG
	case name == "" || strings.ContainsAny(name, "/\x00"):
		return syscall.EINVAL
	}
	return nil
}

// Lookup finds name and takes a reference; ENOENT. "." and ".." are not names.
func (i *Inode) Lookup(name string) (*Inode, error) {
	if !i.isDir() {
		return nil, syscall.ENOTDIR
	}
	if len(name) > MaxNameLen {
		return nil, syscall.ENAMETOOLONG
	}
	if err := i.lockDir(); err != nil {
		return nil, err
	}
	defer i.mu.RUnlock()
	e := i.dir.names[name]
	if e == nil {
		return nil, syscall.ENOENT
	}
	return i.fs.iget(e.ino)
}

// ReadDir calls fn for the entries after cookie (0: from the start) until it
// returns false. "." and ".." are not among them. Entries present all the time
// between the first and the last of a series of calls are given once each. fn
// must not call methods of this directory.
func (i *Inode) ReadDir(cookie int64, fn func(Dirent) bool) error {
	if !i.isDir() {
		return syscall.ENOTDIR
	}
	if err := i.lockDir(); err != nil {
		return err
	}
	defer i.mu.RUnlock()
	order := i.dir.order
	k := sort.Search(len(order), func(k int) bool { return order[k].seq >= cookie })
	for _, e := range order[k:] {
		if !e.dead && !fn(Dirent{Name: e.name, Ino: e.ino, Type: e.typ, Next: e.seq + 1}) {
			break
		}
	}
	return nil
}

// Parent is the inode number of "..".
func (i *Inode) Parent() (uint32, error) {
	if !i.isDir() {
		return 0, syscall.ENOTDIR
	}
	if err := i.lockDir(); err != nil {
		return 0, err
	}
	defer i.mu.RUnlock()
	return i.dir.parent, nil
}

// findEntry gives the place of name in a leaf and of the entry before it (-1: none).
func (i *Inode) findEntry(b []byte, lblk uint32, name string) (off, prev int, err error) {
	end := i.fs.leafEnd()
	prev = -1
	for off = 0; off < end; {
		n, err := i.nextEntry(b, off, end, lblk)
		if err != nil {
			return 0, 0, err
		}
		if le.Uint32(b[off:]) != 0 && int(b[off+6]) == len(name) && string(b[off+dirHeader:off+dirHeader+len(name)]) == name {
			return off, prev, nil
		}
		prev = off
		off += n
	}
	return 0, 0, corruptf("directory %d: entry %q is not in block %d", i.ino, name, lblk)
}

// leafForWrite gives a leaf of the directory for changing.
func (i *Inode) leafForWrite(h *handle, lblk uint32) (*buffer, error) {
	if _, err := i.dirBlock(lblk); err != nil { // verified before it is trusted
		return nil, err
	}
	phys, err := i.dirPhys(lblk)
	if err != nil {
		return nil, err
	}
	return h.write(phys)
}

// setEntry makes an existing entry name another inode. i.mu is held exclusively.
func (i *Inode) setEntry(h *handle, e *dirent, ino uint32, typ uint8) error {
	buf, err := i.leafForWrite(h, e.lblk)
	if err != nil {
		return err
	}
	off, _, err := i.findEntry(buf.data, e.lblk, e.name)
	if err != nil {
		return err
	}
	le.PutUint32(buf.data[off:], ino)
	if i.fs.sb.incompat&incompatFiletype != 0 {
		buf.data[off+7] = typ
	}
	i.sealLeaf(buf)
	e.ino, e.typ = ino, typ
	return nil
}

// removeEntry deletes an entry. i.mu is held exclusively.
func (i *Inode) removeEntry(h *handle, e *dirent) error {
	buf, err := i.leafForWrite(h, e.lblk)
	if err != nil {
		return err
	}
	b := buf.data
	off, prev, err := i.findEntry(b, e.lblk, e.name)
	if err != nil {
		return err
	}
	n := i.fs.recLen(b[off:])
	room := n
	if prev >= 0 {
		whole := i.fs.recLen(b[prev:]) + n
		i.fs.putRecLen(b[prev:], whole)
		clear(b[off : off+recLenNeeded(len(e.name))])
		room = whole
		if le.Uint32(b[prev:]) != 0 {
			room -= recLenNeeded(int(b[prev+6]))
		}
	} else {
		i.fs.putEntry(b[off:], 0, n, "", 0)
	}
	i.sealLeaf(buf)
	d := i.dir
	if d.room != nil {
		d.room[e.lblk] = max(d.room[e.lblk], uint16(room/4))
	}
	d.remove(e)
	return nil
}

// insertInLeaf puts an entry into the first gap of a leaf that holds it; false
// when none does. It also gives the largest gap seen.
func (i *Inode) insertInLeaf(buf *buffer, lblk uint32, name string, ino uint32, typ uint8) (done bool, room int, err error) {
	b := buf.data
	end := i.fs.leafEnd()
	need := recLenNeeded(len(name))
	for off := 0; off < end; {
		n, err := i.nextEntry(b, off, end, lblk)
		if err != nil {
			return false, 0, err
		}
		used := 0
		if le.Uint32(b[off:]) != 0 {
			used = recLenNeeded(int(b[off+6]))
		}
		if n-used >= need {
			if used > 0 {
				i.fs.putRecLen(b[off:], used)
			}
			i.fs.putEntry(b[off+used:], ino, n-used, name, typ)
			i.sealLeaf(buf)
			return true, room, nil
		}
		room = max(room, n-used)
		off += n
	}
	return false, room, nil
}

// addEntry puts a new name into the directory. On error nothing has changed
// to the eye (unless it is fatal). i.mu is held exclusively, the directory open.
func (i *Inode) addEntry(h *handle, name string, ino uint32, typ uint8) error {
	var lblk uint32
	var err error
	if i.hasIndex() {
		lblk, err = i.addIndexed(h, name, ino, typ)
	} else {
		lblk, err = i.addLinear(h, name, ino, typ)
	}
	if ferr := i.flush(h); err == nil { // also on ENOSPC: an index may have been made
		err = ferr
	}
	if err == nil {
		i.dir.add(name, ino, typ, lblk)
	}
	return err
}

// addLinear finds room in any block, makes an htree of a directory of one full
// block, or appends a block.
func (i *Inode) addLinear(h *handle, name string, ino uint32, typ uint8) (uint32, error) {
	d := i.dir
	need := uint16(recLenNeeded(len(name)) / 4)
	for lblk, room := range d.room {
		if room < need {
			continue
		}
		buf, err := i.leafForWrite(h, uint32(lblk))
		if err != nil {
			return 0, err
		}
		done, gap, err := i.insertInLeaf(buf, uint32(lblk), name, ino, typ)
		if err != nil {
			return 0, err
		}
		if done {
			if i.flags()&flagIndex != 0 { // an index this volume no longer maintains
				i.setFlags(i.flags() &^ flagIndex)
			}
			return uint32(lblk), nil
		}
		d.room[lblk] = uint16(gap / 4)
	}
	if d.blocks == 1 && i.fs.sb.compat&compatDirIndex != 0 && i.canIndex() {
		if err := i.makeIndex(h); err != nil {
			return 0, err
		}
		return i.addIndexed(h, name, ino, typ)
	}
	lblks, err := i.growDir(h, 1)
	if err != nil {
		return 0, err
	}
	buf, err := i.newLeaf(h, lblks[0])
	if err != nil {
		return 0, err
	}
	d.room = append(d.room, 0)
	_, _, err = i.insertInLeaf(buf, lblks[0], name, ino, typ)
	d.room[lblks[0]] = uint16((i.fs.leafEnd() - recLenNeeded(len(name))) / 4)
	return lblks[0], err
}

// growDir appends n blocks to the directory, whose contents the caller then
// makes with newLeaf or newIndex. On ENOSPC it gives back what it got.
func (i *Inode) growDir(h *handle, n int) ([]uint32, error) {
	d := i.dir
	start := d.blocks
	var out []uint32
	for range n {
		lblk := d.blocks
		goal := i.blockGoal()
		if lblk > 0 {
			if phys, err := i.dirPhys(lblk - 1); err == nil {
				goal = phys + 1
			}
		}
		phys, err := i.fs.allocMeta(h, goal)
		if err == nil {
			if err = i.insertExtent(h, extent{lblk, 1, phys, false}); err != nil {
				if ferr := i.fs.freeMeta(h, phys); ferr != nil {
					return nil, ferr
				}
			}
		}
		if err != nil {
			if len(out) > 0 {
				if _, rerr := i.removeRange(h, uint64(start), uint64(d.blocks), true); rerr != nil {
					return nil, rerr
				}
				d.blocks = start
				i.setSize(int64(start) << i.fs.sb.blockBits)
			}
			return nil, err
		}
		d.blocks++
		i.setSize(int64(d.blocks) << i.fs.sb.blockBits)
		out = append(out, lblk)
	}
	return out, nil
}

// newLeaf makes block lblk of the directory an empty leaf.
func (i *Inode) newLeaf(h *handle, lblk uint32) (*buffer, error) {
	phys, err := i.dirPhys(lblk)
	if err != nil {
		return nil, err
	}
	buf := h.create(phys)
	i.fs.putEntry(buf.data, 0, i.fs.leafEnd(), "", 0)
	i.sealLeaf(buf)
	return buf, nil
}

// initDir makes the first block of a new directory. i.mu is held exclusively;
// the caller flushes the inode.
func (i *Inode) initDir(h *handle, parent uint32) error {
	i.dir = &dirCache{names: map[string]*dirent{}, seq: 1, parent: parent}
	if _, err := i.growDir(h, 1); err != nil {
		i.dir = nil
		return err
	}
	buf, err := i.newLeaf(h, 0)
	if err != nil {
		return err
	}
	end := i.fs.leafEnd()
	i.fs.putEntry(buf.data, i.ino, minRecLen, ".", TypeDir)
	i.fs.putEntry(buf.data[dotDotAt:], parent, end-dotDotAt, "..", TypeDir)
	i.sealLeaf(buf)
	i.dir.room = []uint16{uint16((end - dotDotAt - minRecLen) / 4)}
	return nil
}

// setParent rewrites "..". i.mu is held exclusively, the directory open.
func (i *Inode) setParent(h *handle, parent uint32) error {
	buf, err := i.leafForWrite(h, 0)
	if err != nil {
		return err
	}
	b := buf.data
	at := i.fs.recLen(b)
	if at > len(b)-minRecLen || at < minRecLen || b[at+6] != 2 || string(b[at+dirHeader:at+dirHeader+2]) != ".." {
		return corruptf("directory %d: second entry is not \"..\"", i.ino)
	}
	le.PutUint32(b[at:], parent)
	if i.hasIndex() {
		i.sealIndex(buf, 0)
	} else {
		i.sealLeaf(buf)
	}
	i.dir.parent = parent
	return nil
}
