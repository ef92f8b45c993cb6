package ext4

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
)

// Offsets in an inode, names as in the format documentation.
const (
	offMode       = 0
	offUIDLo      = 2
	offSizeLo     = 4
	offAtime      = 8
	offCtime      = 12
	offMtime      = 16
	offDtime      = 20
	offGIDLo      = 24
	offLinks      = 26
	offBlocksLo   = 28
	offFlags      = 32
	offBlock      = 40
	lenBlock      = 60
	offGeneration = 100
	offFileACLLo  = 104
	offSizeHi     = 108
	offBlocksHi   = 116
	offFileACLHi  = 118
	offUIDHi      = 120
	offGIDHi      = 122
	offChecksumLo = 124
	offExtraIsize = 128
	offChecksumHi = 130
	offCtimeExtra = 132
	offMtimeExtra = 136
	offAtimeExtra = 140
	offCrtime     = 144
	offCrtimeEx   = 148

	flagIndex      = 0x1000
	flagHugeFile   = 0x40000
	flagExtents    = 0x80000
	flagEAInode    = 0x200000
	flagInlineData = 0x10000000

	// flagsInherited pass from a directory to what is made in it.
	flagsInherited = FlagSync | FlagNoDump | FlagNoAtime | FlagDirSync

	maxExtentBlocks = uint64(1)<<32 - 1 // blocks a file's extents can address
)

// Inode is a reference-counted handle: exactly one exists per inode number in use.
//
// Locks, in the order they are taken: io, then FS.barrier (by handles), then mu
// (directory before what is in it), then the FS's and allocator's.
type Inode struct {
	// Never change.
	fs     *FS
	ino    uint32
	tblBlk uint64 // where the inode is in the table
	tblOff int

	// kind is the type part of the mode; it never changes once loaded.
	kind uint16

	load    sync.Once
	loadErr error // result of load

	refs int // guarded by fs.icMu

	// io is held exclusively by whatever changes data or size, shared by ReadAt.
	// No lock below it is held while data moves.
	io sync.RWMutex

	mu     sync.RWMutex
	raw    []byte    // the inode as on disk, checksum apart; guarded by mu
	dir    *dirCache // of a directory once used; guarded by mu
	filled span      // blocks WriteFunc is filling that look unwritten still; guarded by mu
	// tailDirty: the block with the end of file was handed out by Extents, now or
	// before the volume was opened, so bytes past the end may not be zero; guarded by mu.
	tailDirty bool
	// pastEnd: Extents made written blocks behind the end of file, which SetSize may
	// not have reached yet; guarded by mu.
	pastEnd bool
	untidy  atomic.Bool // tailDirty or pastEnd was set
	// reshaped: size or map differ from what was last flushed, so that fdatasync
	// must wait for the transaction; guarded by mu.
	reshaped bool

	// The newest transactions with a change of the inode, and with one that its data
	// need to be found. 0: none since it was read.
	syncTid, dataTid atomic.Uint64

	win      window       // guarded by fs.alloc.mu
	sizeHint atomic.Int64 // i_size for the allocator

	linkable bool // made by CreateTmp and not named yet; guarded by mu

	// Orphan list, guarded by fs.orphanMu.
	orphan                 bool
	nextOrphan, prevOrphan *Inode
}

// span is a range of file blocks, [lo, hi).
type span struct{ lo, hi uint64 }

func hasExtra(raw []byte, end int) bool {
	return len(raw) > 128 && end <= 128+int(le.Uint16(raw[offExtraIsize:]))
}

// inodeAddr gives block and offset of an inode in its table.
func (fs *FS) inodeAddr(ino uint32) (blk uint64, off int) {
	g := fs.groups[(ino-1)/fs.sb.inodesPerGroup]
	at := uint64((ino-1)%fs.sb.inodesPerGroup) * uint64(fs.sb.inodeSize)
	return g.inodeTable + at>>fs.sb.blockBits, int(at & uint64(fs.sb.blockSize-1))
}

func (fs *FS) validIno(ino uint32) bool {
	return ino != 0 && ino <= fs.sb.inodesCount && (ino == rootIno || ino >= fs.sb.firstIno || ino == fs.sb.journalIno)
}

// iget gives the inode of that number with a reference.
func (fs *FS) iget(ino uint32) (*Inode, error) {
	if !fs.validIno(ino) {
		return nil, corruptf("inode number %d is out of range", ino)
	}
	fs.icMu.Lock()
	i := fs.inodes[ino]
	if i == nil {
		i = fs.newHandle(ino)
		fs.inodes[ino] = i
	} else if i.refs == 0 {
		delete(fs.idle, ino)
	}
	i.refs++
	fs.icMu.Unlock()
	i.load.Do(func() { i.loadErr = i.read() })
	if i.loadErr != nil {
		i.DecRef()
		return nil, i.loadErr
	}
	return i, nil
}

func (fs *FS) newHandle(ino uint32) *Inode {
	i := &Inode{fs: fs, ino: ino}
	i.tblBlk, i.tblOff = fs.inodeAddr(ino)
	return i
}

// Inode gives the inode of that number, with a reference; ESTALE when no such inode is in use.
func (fs *FS) Inode(ino uint32) (*Inode, error) {
	if !fs.validIno(ino) {
		return nil, syscall.ESTALE
	}
	used, err := fs.inodeUsed(ino)
	if err != nil {
		return nil, err
	}
	if !used {
		return nil, syscall.ESTALE
	}
	return fs.iget(ino)
}

// read loads and verifies the inode.
func (i *Inode) read() error {
	b, err := i.fs.bufs.read(i.tblBlk)
	if err != nil {
		return err
	}
	raw := make([]byte, i.fs.sb.inodeSize)
	copy(raw, b.data[i.tblOff:])
	i.raw = raw
	if len(raw) > 128 {
		if x := int(le.Uint16(raw[offExtraIsize:])); x > len(raw)-128 || x%4 != 0 {
			return corruptf("inode %d: extra size %d", i.ino, x)
		}
	}
	if i.fs.sb.has(roCompatMetadataCsum) {
		want := i.fs.inodeChecksum(i.ino, raw)
		got := uint32(le.Uint16(raw[offChecksumLo:]))
		if hasExtra(raw, offChecksumHi+2) {
			got |= uint32(le.Uint16(raw[offChecksumHi:])) << 16
		} else {
			want &= 0xffff
		}
		if got != want {
			return corruptf("inode %d: checksum %#x, counted %#x", i.ino, got, want)
		}
	}
	if i.links() == 0 {
		return corruptf("inode %d: is named but has no links", i.ino)
	}
	if _, ok := typeOfMode[i.mode()&syscall.S_IFMT]; !ok {
		return corruptf("inode %d: mode %#o", i.ino, i.mode())
	}
	i.kind = i.mode() & syscall.S_IFMT
	size := i.size()
	if size < 0 || size > i.fs.maxSize() {
		return corruptf("inode %d: size %d", i.ino, size)
	}
	if acl := i.fileACL(); acl != 0 && !i.fs.sb.inData(acl, 1) {
		return corruptf("inode %d: xattr block %d is outside the volume", i.ino, acl)
	}
	if i.hasExtents() {
		if err := i.checkNode(raw[offBlock:offBlock+lenBlock], -1, 0); err != nil {
			return err
		}
	}
	i.sizeHint.Store(size)
	i.tailDirty = i.isRegular()      // a crash may have left what a mapping put there
	if j := i.fs.journal; j != nil { // it may have been in memory before, and changed
		i.syncTid.Store(j.Running())
		i.dataTid.Store(j.Running())
	}
	return nil
}

// maxSize is the largest file size in bytes.
func (fs *FS) maxSize() int64 {
	return int64(min(maxExtentBlocks<<fs.sb.blockBits, 1<<63-1))
}

// flush stores the inode in its table block. i.mu is held exclusively.
func (i *Inode) flush(h *handle) error {
	b, err := h.write(i.tblBlk)
	if err != nil {
		return err
	}
	if i.fs.sb.has(roCompatMetadataCsum) {
		crc := i.fs.inodeChecksum(i.ino, i.raw)
		le.PutUint16(i.raw[offChecksumLo:], uint16(crc))
		if hasExtra(i.raw, offChecksumHi+2) {
			le.PutUint16(i.raw[offChecksumHi:], uint16(crc>>16))
		}
	}
	copy(b.data[i.tblOff:], i.raw)
	if i.fs.journal != nil {
		tid := h.tid()
		i.syncTid.Store(tid)
		if i.reshaped {
			i.reshaped = false
			i.dataTid.Store(tid)
		}
	}
	if i.size() > 1<<31-1 && i.isRegular() {
		return i.fs.needRoCompat(h, roCompatLargeFile)
	}
	return nil
}

// Ino is the inode number.
func (i *Inode) Ino() uint32 { return i.ino }

// Generation is the inode's generation number.
func (i *Inode) Generation() uint32 {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return le.Uint32(i.raw[offGeneration:])
}

// FS is the volume the inode belongs to.
func (i *Inode) FS() *FS { return i.fs }

// IncRef takes a reference; the caller has one already.
func (i *Inode) IncRef() {
	i.fs.icMu.Lock()
	if i.refs == 0 {
		delete(i.fs.idle, i.ino)
	}
	i.refs++
	i.fs.icMu.Unlock()
}

// DecRef drops a reference; the last one of an inode without links frees it.
func (i *Inode) DecRef() {
	fs := i.fs
	fs.icMu.Lock()
	if i.refs == 1 && i.untidy.Load() {
		// Before the reference goes: without one, another handle of the inode may
		// take this one's place in the cache.
		fs.icMu.Unlock()
		i.tidy()
		fs.icMu.Lock()
	}
	i.refs--
	if i.refs > 0 {
		fs.icMu.Unlock()
		return
	}
	if i.refs < 0 {
		fs.icMu.Unlock()
		panic(fmt.Sprintf("ext4: inode %d: more references dropped than taken", i.ino))
	}
	dead := i.loadErr == nil && i.links() == 0
	if i.loadErr != nil || dead {
		if fs.inodes[i.ino] == i {
			delete(fs.inodes, i.ino)
		}
		fs.icMu.Unlock()
		if dead && !fs.closed.Load() {
			if err := i.destroy(); err != nil && isFatal(err) {
				fs.abort(err)
			}
		}
		return
	}
	fs.idle[i.ino] = i
	var drop *Inode
	if len(fs.idle) > maxIdle {
		for ino, o := range fs.idle {
			delete(fs.idle, ino)
			delete(fs.inodes, ino)
			drop = o
			break
		}
	}
	fs.icMu.Unlock()
	i.ReleaseWindow()
	if drop != nil && drop != i {
		drop.ReleaseWindow()
	}
}

// tidy clears what mappings and in-place writes left behind the end of file.
func (i *Inode) tidy() {
	i.io.Lock()
	defer i.io.Unlock()
	i.untidy.Store(false)
	if i.fs.ReadOnly() {
		return
	}
	i.mu.RLock()
	past, dead, size := i.pastEnd, i.links() == 0, i.size()
	i.mu.RUnlock()
	if dead {
		return
	}
	err := i.cleanTail(size)
	if err == nil && past {
		err = i.cut(size, size)
	}
	if err != nil {
		i.fs.abort(err)
	}
}

// ReleaseWindow gives back space reserved in memory for further appends: call
// it when the last writable descriptor is closed.
func (i *Inode) ReleaseWindow() {
	i.fs.alloc.mu.Lock()
	i.fs.dropWindow(i)
	i.fs.alloc.mu.Unlock()
}

// Accessors of raw; i.mu is held.

func (i *Inode) mode() uint16  { return le.Uint16(i.raw[offMode:]) }
func (i *Inode) links() uint16 { return le.Uint16(i.raw[offLinks:]) }
func (i *Inode) flags() uint32 { return le.Uint32(i.raw[offFlags:]) }

func (i *Inode) setLinks(n uint16)  { le.PutUint16(i.raw[offLinks:], n) }
func (i *Inode) setFlags(f uint32)  { le.PutUint32(i.raw[offFlags:], f) }
func (i *Inode) hasExtents() bool   { return i.flags()&flagExtents != 0 }
func (i *Inode) root() []byte       { return i.raw[offBlock : offBlock+lenBlock] }
func (i *Inode) generation() uint32 { return le.Uint32(i.raw[offGeneration:]) }

func (i *Inode) seed() uint32 { return i.fs.inodeSeed(i.ino, i.generation()) }

// These need no lock.
func (i *Inode) isDir() bool     { return i.kind == syscall.S_IFDIR }
func (i *Inode) isRegular() bool { return i.kind == syscall.S_IFREG }
func (i *Inode) isSymlink() bool { return i.kind == syscall.S_IFLNK }

func (i *Inode) size() int64 {
	s := uint64(le.Uint32(i.raw[offSizeLo:]))
	if i.isRegular() || i.isDir() {
		s |= uint64(le.Uint32(i.raw[offSizeHi:])) << 32
	}
	return int64(s)
}

// setSize stores i_size.
func (i *Inode) setSize(n int64) {
	le.PutUint32(i.raw[offSizeLo:], uint32(n))
	le.PutUint32(i.raw[offSizeHi:], uint32(n>>32))
	i.sizeHint.Store(n)
	i.reshaped = true
}

// needRoCompat records a ro_compat feature that was just used for the first time.
func (fs *FS) needRoCompat(h *handle, bit uint32) error {
	fs.sbMu.Lock()
	defer fs.sbMu.Unlock()
	f := le.Uint32(fs.superB.data[fs.superAt+sFeatureRoCompat:])
	if f&bit != 0 {
		return nil
	}
	raw, err := fs.changeSuper(h)
	if err == nil {
		le.PutUint32(raw[sFeatureRoCompat:], f|bit)
	}
	return err
}

func (i *Inode) fileACL() uint64 {
	v := uint64(le.Uint32(i.raw[offFileACLLo:]))
	if i.fs.sb.incompat&incompat64bit != 0 {
		v |= uint64(le.Uint16(i.raw[offFileACLHi:])) << 32
	}
	return v
}

func (i *Inode) setFileACL(blk uint64) {
	le.PutUint32(i.raw[offFileACLLo:], uint32(blk))
	le.PutUint16(i.raw[offFileACLHi:], uint16(blk>>32))
}

// sectors is i_blocks in units of 512 bytes.
func (i *Inode) sectors() uint64 {
	n := uint64(le.Uint32(i.raw[offBlocksLo:]))
	if i.fs.sb.has(roCompatHugeFile) {
		n |= uint64(le.Uint16(i.raw[offBlocksHi:])) << 32
		if i.flags()&flagHugeFile != 0 {
			n <<= i.fs.sb.blockBits - 9
		}
	}
	return n
}

// addBlocks changes i_blocks by n file system blocks.
func (i *Inode) addBlocks(n int64) {
	i.reshaped = true
	s := uint64(int64(i.sectors()) + n<<(i.fs.sb.blockBits-9))
	f := i.flags() &^ flagHugeFile
	if s >= 1<<48 {
		f |= flagHugeFile
		s >>= i.fs.sb.blockBits - 9
	}
	i.setFlags(f)
	le.PutUint32(i.raw[offBlocksLo:], uint32(s))
	if i.fs.sb.has(roCompatHugeFile) {
		le.PutUint16(i.raw[offBlocksHi:], uint16(s>>32))
	}
}

// getTime reads a time whose nanoseconds and epoch bits are at extra.
func (i *Inode) getTime(at, extra int) Timespec {
	t := Timespec{Sec: int64(int32(le.Uint32(i.raw[at:])))}
	if hasExtra(i.raw, extra+4) {
		x := le.Uint32(i.raw[extra:])
		t.Sec += int64(x&3) << 32
		t.Nsec = min(x>>2, 999999999)
	}
	return t
}

// Bounds of representable times: 1901-12-13 to 2446-05-10, to 2038 in inodes of 128 bytes.
const (
	minSec      = -1 << 31
	maxSec      = 1<<31 - 1 + 3<<32
	maxSecSmall = 1<<31 - 1
)

// putTime stores a time, clamped to what the inode can hold.
func (i *Inode) putTime(at, extra int, t Timespec) {
	wide := hasExtra(i.raw, extra+4)
	last := int64(maxSecSmall)
	if wide {
		last = maxSec
	}
	if t.Sec < minSec {
		t = Timespec{Sec: minSec}
	} else if t.Sec > last {
		t = Timespec{Sec: last}
	}
	le.PutUint32(i.raw[at:], uint32(t.Sec))
	if wide {
		epoch := uint32((t.Sec-int64(int32(t.Sec)))>>32) & 3
		le.PutUint32(i.raw[extra:], t.Nsec<<2|epoch)
	}
}

// device decodes the numbers of a device node: the old encoding in the first
// word of i_block when they are below 256, else the new one in the second.
func (i *Inode) device() (major, minor uint32) {
	b := i.root()
	if old := le.Uint32(b); old != 0 {
		return old >> 8 & 0xff, old & 0xff
	}
	d := le.Uint32(b[4:])
	return d >> 8 & 0xfff, d&0xff | d>>12&0xfff00
}

func (i *Inode) setDevice(major, minor uint32) {
	b := i.root()
	clear(b)
	if major < 256 && minor < 256 {
		le.PutUint32(b, major<<8|minor)
		return
	}
	le.PutUint32(b[4:], minor&0xff|major<<8|minor&^0xff<<12)
}

// Attr gives the attributes.
func (i *Inode) Attr() Attr {
	i.mu.RLock()
	defer i.mu.RUnlock()
	a := Attr{
		Mode:      i.mode(),
		UID:       uint32(le.Uint16(i.raw[offUIDLo:])) | uint32(le.Uint16(i.raw[offUIDHi:]))<<16,
		GID:       uint32(le.Uint16(i.raw[offGIDLo:])) | uint32(le.Uint16(i.raw[offGIDHi:]))<<16,
		Nlink:     uint32(i.links()),
		Size:      i.size(),
		Blocks512: int64(i.sectors()),
		Atime:     i.getTime(offAtime, offAtimeExtra),
		Mtime:     i.getTime(offMtime, offMtimeExtra),
		Ctime:     i.getTime(offCtime, offCtimeExtra),
		Flags:     i.flags(),
	}
	if hasExtra(i.raw, offCrtime+4) {
		a.Crtime = i.getTime(offCrtime, offCrtimeEx)
	}
	if a.Flags&flagInlineData != 0 && i.isRegular() {
		a.Blocks512 += (a.Size + 511) >> 9 // as the kernel does, lest tools think the file is all hole
	}
	switch a.Mode & syscall.S_IFMT {
	case syscall.S_IFCHR, syscall.S_IFBLK:
		a.RdevMajor, a.RdevMinor = i.device()
	}
	return a
}

// Size is Attr().Size, cheaper.
func (i *Inode) Size() int64 {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.size()
}

func (i *Inode) putIDs(uid, gid uint32) {
	le.PutUint16(i.raw[offUIDLo:], uint16(uid))
	le.PutUint16(i.raw[offUIDHi:], uint16(uid>>16))
	le.PutUint16(i.raw[offGIDLo:], uint16(gid))
	le.PutUint16(i.raw[offGIDHi:], uint16(gid>>16))
}

// SetAttr changes attributes. Ctime becomes now unless it is given. Permission
// and the set-id rules are the caller's.
func (i *Inode) SetAttr(s SetAttr) error {
	return i.change(func() {
		if s.Mask&SetMode != 0 {
			le.PutUint16(i.raw[offMode:], i.mode()&syscall.S_IFMT|s.Mode&0o7777)
		}
		if s.Mask&SetUID != 0 {
			le.PutUint16(i.raw[offUIDLo:], uint16(s.UID))
			le.PutUint16(i.raw[offUIDHi:], uint16(s.UID>>16))
		}
		if s.Mask&SetGID != 0 {
			le.PutUint16(i.raw[offGIDLo:], uint16(s.GID))
			le.PutUint16(i.raw[offGIDHi:], uint16(s.GID>>16))
		}
		if s.Mask&SetAtime != 0 {
			i.putTime(offAtime, offAtimeExtra, s.Atime)
		}
		if s.Mask&SetMtime != 0 {
			i.putTime(offMtime, offMtimeExtra, s.Mtime)
		}
		if s.Mask&SetFlags != 0 {
			i.setFlags(i.flags()&^FlagsSettable | s.Flags&FlagsSettable)
		}
		if s.Mask&SetCtime != 0 {
			i.putTime(offCtime, offCtimeExtra, s.Ctime)
		} else {
			i.putTime(offCtime, offCtimeExtra, i.fs.timespec())
		}
	})
}

// Touch sets the times in mask (SetAtime|SetMtime|SetCtime) to now.
func (i *Inode) Touch(mask uint32) error {
	return i.change(func() { i.touch(mask) })
}

// touch is Touch with i.mu held and flushing left to the caller.
func (i *Inode) touch(mask uint32) {
	now := i.fs.timespec()
	if mask&SetAtime != 0 {
		i.putTime(offAtime, offAtimeExtra, now)
	}
	if mask&SetMtime != 0 {
		i.putTime(offMtime, offMtimeExtra, now)
	}
	if mask&SetCtime != 0 {
		i.putTime(offCtime, offCtimeExtra, now)
	}
}

// change runs fn on the inode in a handle of its own.
func (i *Inode) change(fn func()) error {
	h, err := i.fs.begin(inodeCredits)
	if err != nil {
		return err
	}
	i.mu.Lock()
	fn()
	err = i.flush(h)
	i.mu.Unlock()
	h.end(err)
	return err
}

// blockGoal is where the inode's first block should go: the start of its group.
func (i *Inode) blockGoal() uint64 {
	return i.fs.sb.groupStart((i.ino - 1) / i.fs.sb.inodesPerGroup)
}

// Sync makes the inode durable as Options.Durable says; with dataOnly as far as
// its data need it (fdatasync: times may be lost).
func (i *Inode) Sync(dataOnly bool) error {
	tid := &i.syncTid
	if dataOnly {
		tid = &i.dataTid
	}
	return i.fs.sync(max(tid.Load(), 1)) // transaction 1 was long ago
}
