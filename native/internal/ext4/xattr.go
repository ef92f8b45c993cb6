package ext4

import (
	"cmp"
	"slices"
	"strings"
	"syscall"
)

// Extended attributes live in the inode behind its extra fields and in one
// block more. Both are decoded whole, changed in memory and encoded again. An
// attribute goes into the inode when it fits there, else into the block.

const (
	xattrMagic     = 0xEA020000
	xattrHeader    = 32 // of a block
	xattrEntry     = 16 // before the name
	xattrMaxValue  = 65536
	xattrSystem    = 7 // name index of "system."
	xattrACLAccess = 2
	xattrACLDeflt  = 3
)

// xattrPrefixes maps name indexes to prefixes; the two ACLs are whole names.
var xattrPrefixes = []struct {
	index  uint8
	prefix string
	whole  bool
}{
	{1, "user.", false},
	{xattrACLAccess, "system.posix_acl_access", true},
	{xattrACLDeflt, "system.posix_acl_default", true},
	{4, "trusted.", false},
	{6, "security.", false},
}

// xattr is one attribute; name is without its prefix.
type xattr struct {
	index uint8
	name  string
	value []byte
}

func compareXattr(a, b xattr) int {
	return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)), cmp.Compare(a.name, b.name))
}

// splitXattr gives name index and rest of a full name; EOPNOTSUPP for a prefix
// that the format has no place for.
func splitXattr(full string) (index uint8, name string, err error) {
	if len(full) > MaxNameLen {
		return 0, "", syscall.ERANGE
	}
	for _, p := range xattrPrefixes {
		if p.whole && full == p.prefix {
			return p.index, "", nil
		}
		if rest, ok := strings.CutPrefix(full, p.prefix); ok && !p.whole {
			if rest == "" || strings.IndexByte(rest, 0) >= 0 {
				return 0, "", syscall.EINVAL
			}
			return p.index, rest, nil
		}
	}
	return 0, "", syscall.EOPNOTSUPP
}

// joinXattr gives the full name; ok is false for attributes that are not shown.
func joinXattr(x xattr) (full string, ok bool) {
	for _, p := range xattrPrefixes {
		if p.index == x.index && p.whole == (x.name == "") {
			return p.prefix + x.name, true
		}
	}
	return "", false
}

// decodeXattrs reads the entries at p, whose value offsets count from base.
func (i *Inode) decodeXattrs(p, base []byte, where string) ([]xattr, error) {
	var out []xattr
	for off := 0; ; {
		if off+4 > len(p) {
			return nil, corruptf("inode %d: xattrs in the %s run over the end", i.ino, where)
		}
		if le.Uint32(p[off:]) == 0 {
			return out, nil
		}
		if off+xattrEntry > len(p) {
			return nil, corruptf("inode %d: xattrs in the %s run over the end", i.ino, where)
		}
		n := int(p[off])
		at, inum, size := int(le.Uint16(p[off+2:])), le.Uint32(p[off+4:]), le.Uint32(p[off+8:])
		end := off + (xattrEntry+n+3)&^3
		if end > len(p) {
			return nil, corruptf("inode %d: xattrs in the %s run over the end", i.ino, where)
		}
		if inum != 0 {
			return nil, corruptf("inode %d: xattr value in inode %d", i.ino, inum)
		}
		if size > xattrMaxValue || at > len(base) || int(size) > len(base)-at {
			return nil, corruptf("inode %d: xattr value of %d bytes at %d of the %s", i.ino, size, at, where)
		}
		x := xattr{index: p[off+1], name: string(p[off+xattrEntry : off+xattrEntry+n])}
		x.value = slices.Clone(base[at : at+int(size)])
		out = append(out, x)
		off = end
	}
}

// bodyArea is the part of the inode for xattrs, nil when there is none.
func (i *Inode) bodyArea() []byte {
	if len(i.raw) <= 128 {
		return nil
	}
	at := 128 + int(le.Uint16(i.raw[offExtraIsize:]))
	if at+8 > len(i.raw) {
		return nil
	}
	return i.raw[at:]
}

// bodyXattrs decodes the attributes in the inode. i.mu is held.
func (i *Inode) bodyXattrs() ([]xattr, error) {
	p := i.bodyArea()
	if p == nil || le.Uint32(p) != xattrMagic {
		return nil, nil
	}
	return i.decodeXattrs(p[4:], p[4:], "inode")
}

// xattrBlock reads and verifies the attribute block. i.mu is held.
func (i *Inode) xattrBlock() (*buffer, error) {
	blk := i.fileACL()
	if blk == 0 {
		return nil, nil
	}
	b, err := i.fs.bufs.read(blk)
	if err != nil || b.kind.Load() == kindXattr {
		return b, err
	}
	if le.Uint32(b.data) != xattrMagic || le.Uint32(b.data[8:]) != 1 || le.Uint32(b.data[4:]) == 0 {
		return nil, corruptf("inode %d: block %d is not an xattr block", i.ino, blk)
	}
	if i.fs.sb.has(roCompatMetadataCsum) && i.fs.xattrChecksum(blk, b.data) != le.Uint32(b.data[16:]) {
		return nil, corruptf("inode %d: checksum of xattr block %d", i.ino, blk)
	}
	b.kind.Store(kindXattr)
	return b, nil
}

// blockXattrs decodes the attributes in the block. i.mu is held.
func (i *Inode) blockXattrs() ([]xattr, error) {
	i.fs.xattrMu.Lock() // a shared block's header changes under this lock
	defer i.fs.xattrMu.Unlock()
	b, err := i.xattrBlock()
	if err != nil || b == nil {
		return nil, err
	}
	return i.decodeXattrs(b.data[xattrHeader:], b.data, "block")
}

// inlineXattr is the value of system.data, where inline contents go on.
func (i *Inode) inlineXattr() ([]byte, error) {
	list, err := i.bodyXattrs()
	if err != nil {
		return nil, err
	}
	for _, x := range list {
		if x.index == xattrSystem && x.name == "data" {
			return x.value, nil
		}
	}
	return nil, nil
}

// entrySpace and valueSpace are what an attribute takes.
func (x xattr) entrySpace() int { return (xattrEntry + len(x.name) + 3) &^ 3 }
func (x xattr) valueSpace() int { return (len(x.value) + 3) &^ 3 }

// fitsXattrs tells whether list fits in size bytes (with the closing zero word).
func fitsXattrs(list []xattr, size int) bool {
	n := 4
	for _, x := range list {
		n += x.entrySpace() + x.valueSpace()
	}
	return n <= size
}

// encodeXattrs writes list at p, values from the end of base downwards; p is the
// end part of base. With hashes it fills in entry hashes.
func encodeXattrs(list []xattr, p, base []byte, hashes bool) {
	clear(p)
	off, end := 0, len(base)&^3
	for _, x := range list {
		p[off] = uint8(len(x.name))
		p[off+1] = x.index
		if len(x.value) > 0 {
			end -= x.valueSpace()
			copy(base[end:], x.value)
			le.PutUint16(p[off+2:], uint16(end))
		}
		le.PutUint32(p[off+8:], uint32(len(x.value)))
		copy(p[off+xattrEntry:], x.name)
		if hashes {
			le.PutUint32(p[off+12:], xattrHash(x))
		}
		off += x.entrySpace()
	}
}

// xattrHash is an entry's hash: over the name's bytes, then the value's words.
func xattrHash(x xattr) uint32 {
	var h uint32
	for k := range len(x.name) {
		h = h<<5 ^ h>>27 ^ uint32(x.name[k])
	}
	var word [4]byte
	for v := x.value; len(v) > 0; v = v[min(4, len(v)):] {
		word = [4]byte{}
		copy(word[:], v)
		h = h<<16 ^ h>>16 ^ le.Uint32(word[:])
	}
	return h
}

// GetXattr gives the value of an extended attribute by its full name; ENODATA.
func (i *Inode) GetXattr(name string) ([]byte, error) {
	index, rest, err := splitXattr(name)
	if err != nil {
		return nil, err
	}
	i.mu.RLock()
	defer i.mu.RUnlock()
	for _, from := range []func() ([]xattr, error){i.bodyXattrs, i.blockXattrs} {
		list, err := from()
		if err != nil {
			return nil, err
		}
		for _, x := range list {
			if x.index == index && x.name == rest {
				return decodeXattrValue(i.ino, x)
			}
		}
	}
	return nil, syscall.ENODATA
}

// ListXattr gives the full names.
func (i *Inode) ListXattr() ([]string, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	body, err := i.bodyXattrs()
	if err != nil {
		return nil, err
	}
	block, err := i.blockXattrs()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, x := range slices.Concat(body, block) {
		if full, ok := joinXattr(x); ok {
			out = append(out, full)
		}
	}
	return out, nil
}

// SetXattr sets an extended attribute; flags are Xattr…. EEXIST and ENODATA as
// in setxattr(2), E2BIG above 64 KiB, ERANGE for a name too long, ENOSPC when it
// does not fit in inode and block.
func (i *Inode) SetXattr(name string, value []byte, flags int) error {
	index, rest, err := splitXattr(name)
	if err != nil {
		return err
	}
	if flags&^(XattrCreate|XattrReplace) != 0 {
		return syscall.EINVAL
	}
	if len(value) > xattrMaxValue {
		return syscall.E2BIG
	}
	x := xattr{index, rest, slices.Clone(value)}
	if index == xattrACLAccess || index == xattrACLDeflt {
		if x.value, err = encodeACL(value); err != nil {
			return err
		}
	}
	return i.changeXattr(x, flags, false)
}

// RemoveXattr removes an extended attribute; ENODATA.
func (i *Inode) RemoveXattr(name string) error {
	index, rest, err := splitXattr(name)
	if err != nil {
		return err
	}
	return i.changeXattr(xattr{index: index, name: rest}, XattrReplace, true)
}

func (i *Inode) changeXattr(x xattr, flags int, remove bool) error {
	return i.fs.again(func() error {
		h, err := i.fs.begin(dataCredits)
		if err != nil {
			return err
		}
		i.mu.Lock()
		err = i.changeXattrLocked(h, x, flags, remove)
		i.mu.Unlock()
		h.end(err)
		return err
	})
}

// changeXattrLocked is changeXattr in a handle with i.mu held exclusively.
func (i *Inode) changeXattrLocked(h *handle, x xattr, flags int, remove bool) error {
	body, err := i.bodyXattrs()
	if err != nil {
		return err
	}
	block, err := i.blockXattrs()
	if err != nil {
		return err
	}
	same := func(o xattr) bool { return o.index == x.index && o.name == x.name }
	inBody, inBlock := slices.IndexFunc(body, same), slices.IndexFunc(block, same)
	exists := inBody >= 0 || inBlock >= 0
	switch {
	case exists && flags&XattrCreate != 0:
		return syscall.EEXIST
	case !exists && flags&XattrReplace != 0:
		return syscall.ENODATA
	}
	newBody, newBlock := slices.DeleteFunc(slices.Clone(body), same), slices.DeleteFunc(slices.Clone(block), same)
	if !remove {
		area := i.bodyArea()
		if area != nil && fitsXattrs(append(slices.Clone(newBody), x), len(area)-4) {
			newBody = append(newBody, x)
		} else if newBlock = append(newBlock, x); !fitsXattrs(newBlock, i.fs.sb.blockSize-xattrHeader) {
			return syscall.ENOSPC
		}
	}
	slices.SortFunc(newBody, compareXattr)
	slices.SortFunc(newBlock, compareXattr)
	// Only the block can fail for lack of space: it goes first.
	if inBlock >= 0 || len(newBlock) != len(block) {
		if err := i.storeXattrBlock(h, newBlock); err != nil {
			return err
		}
	}
	if area := i.bodyArea(); area != nil && (inBody >= 0 || len(newBody) != len(body)) {
		clear(area)
		if len(newBody) > 0 {
			le.PutUint32(area, xattrMagic)
			encodeXattrs(newBody, area[4:], area[4:], false)
		}
	}
	i.touch(SetCtime)
	return i.flush(h)
}

// storeXattrBlock makes list the contents of the attribute block: in place when
// it is not shared, else in a new one; an empty list gives it up.
func (i *Inode) storeXattrBlock(h *handle, list []xattr) error {
	fs := i.fs
	if len(list) == 0 {
		return i.dropXattrBlock(h)
	}
	fs.xattrMu.Lock()
	defer fs.xattrMu.Unlock()
	old, err := i.xattrBlock()
	if err != nil {
		return err
	}
	var buf *buffer
	if old != nil && le.Uint32(old.data[4:]) == 1 {
		if buf, err = h.write(old.blk); err != nil {
			return err
		}
	} else {
		blk, err := fs.allocMeta(h, i.blockGoal())
		if err != nil {
			return err
		}
		if old != nil {
			if err := i.unshareXattrBlock(h); err != nil {
				return err
			}
		} else {
			i.addBlocks(1)
		}
		buf = h.create(blk)
		i.setFileACL(blk)
	}
	b := buf.data
	clear(b[:xattrHeader])
	encodeXattrs(list, b[xattrHeader:], b, true)
	le.PutUint32(b, xattrMagic)
	le.PutUint32(b[4:], 1)
	le.PutUint32(b[8:], 1)
	var hash uint32
	for _, x := range list {
		e := xattrHash(x)
		if e == 0 { // an unhashable entry makes the block unshareable
			hash = 0
			break
		}
		hash = hash<<16 ^ hash>>16 ^ e
	}
	le.PutUint32(b[12:], hash)
	i.sealXattr(buf)
	return nil
}

func (i *Inode) sealXattr(buf *buffer) {
	buf.kind.Store(kindXattr)
	if i.fs.sb.has(roCompatMetadataCsum) {
		le.PutUint32(buf.data[16:], i.fs.xattrChecksum(buf.blk, buf.data))
	}
}

// unshareXattrBlock drops this inode's reference on a shared block. fs.xattrMu is held.
func (i *Inode) unshareXattrBlock(h *handle) error {
	buf, err := h.write(i.fileACL())
	if err != nil {
		return err
	}
	le.PutUint32(buf.data[4:], le.Uint32(buf.data[4:])-1)
	i.sealXattr(buf)
	return nil
}

// dropXattrBlock gives up the attribute block. i.mu is held exclusively.
func (i *Inode) dropXattrBlock(h *handle) error {
	i.fs.xattrMu.Lock()
	defer i.fs.xattrMu.Unlock()
	b, err := i.xattrBlock()
	if err != nil || b == nil {
		return err
	}
	if le.Uint32(b.data[4:]) > 1 {
		err = i.unshareXattrBlock(h)
	} else {
		err = i.fs.freeMeta(h, b.blk)
	}
	i.setFileACL(0)
	i.addBlocks(-1)
	return err
}

// ACLs are stored shorter than system calls show them: version 1 instead of 2,
// and an id only for named users and groups.
const (
	aclUser    = 0x02
	aclGroup   = 0x08
	aclNoID    = 0xffffffff
	aclVersion = 1
	aclAPI     = 2
)

func encodeACL(v []byte) ([]byte, error) {
	if len(v) < 4 || (len(v)-4)%8 != 0 || le.Uint32(v) != aclAPI {
		return nil, syscall.EINVAL
	}
	out := le.AppendUint32(nil, aclVersion)
	for v = v[4:]; len(v) > 0; v = v[8:] {
		out = append(out, v[:4]...)
		if tag := le.Uint16(v); tag == aclUser || tag == aclGroup {
			out = append(out, v[4:8]...)
		}
	}
	return out, nil
}

func decodeXattrValue(ino uint32, x xattr) ([]byte, error) {
	if x.index != xattrACLAccess && x.index != xattrACLDeflt {
		return x.value, nil
	}
	v := x.value
	if len(v) < 4 || le.Uint32(v) != aclVersion {
		return nil, corruptf("inode %d: access control list", ino)
	}
	out := le.AppendUint32(nil, aclAPI)
	for v = v[4:]; len(v) > 0; {
		if len(v) < 4 {
			return nil, corruptf("inode %d: access control list", ino)
		}
		out = append(out, v[:4]...)
		tag := le.Uint16(v)
		v = v[4:]
		if tag == aclUser || tag == aclGroup {
			if len(v) < 4 {
				return nil, corruptf("inode %d: access control list", ino)
			}
			out = append(out, v[:4]...)
			v = v[4:]
		} else {
			out = le.AppendUint32(out, aclNoID)
		}
	}
	return out, nil
}
