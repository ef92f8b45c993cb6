package sentryfs

import (
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/kernel/pipe"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/socket/unix/transport"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"gvx.dev/gvx/native/internal/ext4"
)

// inode is what the Sentry keeps of an ext4 inode while dentries name it. Attributes live in ei.
type inode struct {
	fs *filesystem

	// ei is the ext4 inode, with a reference. It changes only in a restore.
	ei *ext4.Inode

	// ino is ei's number and fileType its S_IFMT bits. Immutable.
	ino      uint32
	fileType uint16

	// refs counts dentries; below filesystem.inodesMu.
	refs int64

	// mu makes size changes, appends and read-modify-write changes of attributes atomic.
	mu sync.Mutex

	// dataMu held for reading keeps the inode's blocks from being freed.
	dataMu sync.RWMutex

	// mapEnd is where translations end at the latest: lowered while a truncation is on its way. Below dataMu.
	mapEnd int64

	// writableMapped is set for good once a shared writable mapping exists: bytes past the end of file may then be dirty.
	writableMapped atomic.Bool

	// mapsMu protects mappings.
	mapsMu   sync.Mutex
	mappings memmap.MappingSet

	// writers counts writable file descriptions.
	writers atomic.Int64

	// acls are the access control lists, read when first needed; nil pointer inside: none.
	acls atomic.Pointer[acls]

	// noCaps is set when the inode is known to have no file capabilities, so that writes need not look.
	noCaps atomic.Bool

	// pipe is the pipe of a FIFO, made by the first open; below mu.
	pipe *pipe.VFSPipe

	// ep is what a socket file made by bind(2) in this Sentry leads to. Immutable.
	ep transport.BoundEndpoint

	// tmpfile is set on a nameless file that may still get a name (O_TMPFILE without O_EXCL).
	tmpfile atomic.Bool

	locks   vfs.FileLocks
	watches vfs.Watches
}

// acls are the two POSIX access control lists of an inode.
type acls struct{ access, def *vfs.PosixACL }

// inodeOf returns the inode of ei with a reference, and takes over the caller's on ei.
func (fs *filesystem) inodeOf(ei *ext4.Inode) *inode {
	fs.inodesMu.Lock()
	defer fs.inodesMu.Unlock()
	ino := ei.Ino()
	if i := fs.inodes[ino]; i != nil {
		i.refs++
		ei.DecRef() // i has its own, so this is never the last one
		return i
	}
	i := &inode{fs: fs, ei: ei, ino: ino, fileType: ei.Attr().Mode & linux.S_IFMT, refs: 1, mapEnd: math.MaxInt64}
	fs.inodes[ino] = i
	return i
}

func (i *inode) incRef() {
	i.fs.inodesMu.Lock()
	i.refs++
	i.fs.inodesMu.Unlock()
}

// decRef drops a reference; with the last one the inode is forgotten, and freed on the volume when it has no name.
func (i *inode) decRef(ctx context.Context) {
	i.fs.inodesMu.Lock()
	i.refs--
	last := i.refs == 0
	if last {
		delete(i.fs.inodes, i.ino)
	}
	i.fs.inodesMu.Unlock()
	if !last {
		return
	}
	if i.ei.Attr().Nlink == 0 {
		i.watches.HandleDeletion(ctx)
	} else if err := i.zeroTail(math.MaxInt64); err != nil {
		ctx.Warningf("ext4: clearing the tail of inode %d: %v", i.ino, err)
	}
	i.ei.DecRef()
}

// openPipe returns the pipe of a FIFO.
func (i *inode) openPipe() *pipe.VFSPipe {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.pipe == nil {
		i.pipe = pipe.NewVFSPipe(true, pipe.DefaultPipeSize)
	}
	return i.pipe
}

// forgettable tells whether nothing would be lost by making the inode anew when it is looked up again.
func (i *inode) forgettable() bool { return i.ep == nil && i.watches.Size() == 0 }

func (i *inode) isDir() bool     { return i.fileType == linux.S_IFDIR }
func (i *inode) isRegular() bool { return i.fileType == linux.S_IFREG }
func (i *inode) isSymlink() bool { return i.fileType == linux.S_IFLNK }

// direntType is the file type as d_type has it.
func direntType(t uint8) uint8 {
	switch t {
	case ext4.TypeRegular:
		return linux.DT_REG
	case ext4.TypeDir:
		return linux.DT_DIR
	case ext4.TypeChar:
		return linux.DT_CHR
	case ext4.TypeBlock:
		return linux.DT_BLK
	case ext4.TypeFIFO:
		return linux.DT_FIFO
	case ext4.TypeSocket:
		return linux.DT_SOCK
	case ext4.TypeSymlink:
		return linux.DT_LNK
	}
	return linux.DT_UNKNOWN
}

// checkPermissions checks access by mode bits, access control list and capabilities, and what inode flags forbid.
func (i *inode) checkPermissions(creds *auth.Credentials, ats vfs.AccessTypes) error {
	a := i.ei.Attr()
	if ats.MayWrite() && a.Flags&ext4.FlagImmutable != 0 {
		return linuxerr.EPERM
	}
	return vfs.GenericCheckPermissions(creds, ats, linux.FileMode(a.Mode), i.acl().access, auth.KUID(a.UID), auth.KGID(a.GID))
}

// mayDelete checks that creds may remove child from directory i (Linux's fs/namei.c:may_delete() but for types).
func (i *inode) mayDelete(creds *auth.Credentials, child *inode) error {
	if err := i.checkPermissions(creds, vfs.MayWrite|vfs.MayExec); err != nil {
		return err
	}
	d, c := i.ei.Attr(), child.ei.Attr()
	if (d.Flags|c.Flags)&(ext4.FlagAppend|ext4.FlagImmutable) != 0 {
		return linuxerr.EPERM
	}
	return vfs.CheckDeleteSticky(creds, linux.FileMode(d.Mode), auth.KUID(d.UID), auth.KUID(c.UID), auth.KGID(c.GID))
}

func statxTime(t ext4.Timespec) linux.StatxTimestamp {
	return linux.StatxTimestamp{Sec: t.Sec, Nsec: t.Nsec}
}

// statTo fills stat. It takes no lock but ext4's own.
func (i *inode) statTo(stat *linux.Statx) {
	a := i.ei.Attr()
	stat.Mask = linux.STATX_BASIC_STATS
	stat.Blksize = uint32(i.fs.vol.FS.BlockSize())
	stat.Nlink = a.Nlink
	stat.UID = a.UID
	stat.GID = a.GID
	stat.Mode = a.Mode
	stat.Ino = uint64(i.ino)
	stat.Size = uint64(a.Size)
	stat.Blocks = uint64(a.Blocks512)
	stat.Atime = statxTime(a.Atime)
	stat.Mtime = statxTime(a.Mtime)
	stat.Ctime = statxTime(a.Ctime)
	if a.Crtime != (ext4.Timespec{}) {
		stat.Mask |= linux.STATX_BTIME
		stat.Btime = statxTime(a.Crtime)
	}
	// These inode flags and statx attributes have the same bits.
	const attributes = linux.STATX_ATTR_IMMUTABLE | linux.STATX_ATTR_APPEND | linux.STATX_ATTR_NODUMP
	stat.AttributesMask = attributes
	stat.Attributes = uint64(a.Flags & attributes)
	stat.RdevMajor, stat.RdevMinor = a.RdevMajor, a.RdevMinor
	stat.DevMajor, stat.DevMinor = linux.UNNAMED_MAJOR, i.fs.devMinor
}

// setStat implements SetStat and SetStatAt. The caller has called CheckBeginWrite where that is needed.
func (i *inode) setStat(ctx context.Context, creds *auth.Credentials, opts *vfs.SetStatOptions) error {
	stat := &opts.Stat
	if stat.Mask == 0 {
		return nil
	}
	const settable = linux.STATX_MODE | linux.STATX_UID | linux.STATX_GID | linux.STATX_ATIME | linux.STATX_MTIME | linux.STATX_CTIME | linux.STATX_SIZE
	if stat.Mask&^settable != 0 {
		return linuxerr.EPERM
	}
	if stat.Mask&linux.STATX_SIZE != 0 {
		switch {
		case i.isDir():
			return linuxerr.EISDIR
		case !i.isRegular() || stat.Size > math.MaxInt64:
			return linuxerr.EINVAL
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	a := i.ei.Attr()
	if a.Flags&ext4.FlagImmutable != 0 || a.Flags&ext4.FlagAppend != 0 && stat.Mask&(linux.STATX_MODE|linux.STATX_UID|linux.STATX_GID|linux.STATX_SIZE) != 0 {
		return linuxerr.EPERM
	}
	lists := i.acl()
	if stat.Mask&linux.STATX_GID != 0 && stat.GID == a.GID && auth.KUID(a.UID) == creds.EffectiveKUID {
		// An owner may give a file the group it has; CheckSetStat would ask him to be a member.
		checked := *opts
		checked.Stat.Mask &^= linux.STATX_GID
		if err := vfs.CheckSetStat(ctx, creds, &checked, linux.FileMode(a.Mode), lists.access, auth.KUID(a.UID), auth.KGID(a.GID)); err != nil {
			return err
		}
		stat.Mode = checked.Stat.Mode // without a set-group-ID bit he may not set
	} else if err := vfs.CheckSetStat(ctx, creds, opts, linux.FileMode(a.Mode), lists.access, auth.KUID(a.UID), auth.KGID(a.GID)); err != nil {
		return err
	}
	set := ext4.SetAttr{Mode: a.Mode &^ linux.S_IFMT}
	if stat.Mask&linux.STATX_SIZE != 0 {
		if err := i.truncateLocked(int64(stat.Size)); err != nil {
			return err
		}
	}
	if stat.Mask&linux.STATX_UID != 0 {
		set.Mask |= ext4.SetUID
		set.UID = stat.UID
	}
	if stat.Mask&linux.STATX_GID != 0 {
		set.Mask |= ext4.SetGID
		set.GID = stat.GID
	}
	if stat.Mask&linux.STATX_MODE != 0 {
		perm := stat.Mode & linux.PermissionsMask
		if lists.access != nil {
			list := lists.access.Chmod(perm)
			m, equiv := list.Mode()
			perm = m & linux.PermissionsMask
			newList := &list
			if equiv {
				newList = nil
			}
			if err := i.storeACL(vfs.AccessACL, newList); err != nil {
				return err
			}
		}
		set.Mask |= ext4.SetMode
		set.Mode = stat.Mode&^(linux.S_IFMT|linux.PermissionsMask) | perm
	}
	if opts.ClearPrivs {
		// chown takes the bits from everyone, a truncation only from those who could not set them.
		keep := stat.Mask&(linux.STATX_UID|linux.STATX_GID) == 0 && creds.HasRootCapability(linux.CAP_FSETID)
		if m := i.dropSetID(creds, set.Mode, auth.KUID(a.UID), auth.KGID(a.GID)); m != set.Mode && !keep {
			set.Mask |= ext4.SetMode
			set.Mode = m
		}
		if err := i.killCaps(); err != nil {
			return err
		}
	}
	var touch uint32
	for _, t := range []struct {
		mask uint32
		ts   linux.StatxTimestamp
		bit  uint32
		to   *ext4.Timespec
	}{
		{linux.STATX_ATIME, stat.Atime, ext4.SetAtime, &set.Atime},
		{linux.STATX_MTIME, stat.Mtime, ext4.SetMtime, &set.Mtime},
		{linux.STATX_CTIME, stat.Ctime, ext4.SetCtime, &set.Ctime},
	} {
		switch {
		case stat.Mask&t.mask == 0:
		case t.ts.Nsec == linux.UTIME_NOW:
			touch |= t.bit
		default:
			set.Mask |= t.bit
			*t.to = ext4.Timespec{Sec: t.ts.Sec, Nsec: t.ts.Nsec}
		}
	}
	if stat.Mask&linux.STATX_SIZE != 0 && (set.Mask|touch)&ext4.SetMtime == 0 {
		touch |= ext4.SetMtime
	}
	if set.Mask != 0 {
		if err := i.ei.SetAttr(set); err != nil {
			return toErr(err)
		}
	}
	if touch != 0 {
		if set.Mask&ext4.SetCtime == 0 {
			touch |= ext4.SetCtime
		}
		return toErr(i.ei.Touch(touch))
	}
	return nil
}

// dropSetID is mode without the bits that a change by creds takes from a file of that owner: set-user-ID, and set-group-ID where the
// group may execute or creds is no member of it (Linux's fs/attr.c:setattr_should_drop_sgid()). Directories keep theirs.
func (i *inode) dropSetID(creds *auth.Credentials, mode uint16, kuid auth.KUID, kgid auth.KGID) uint16 {
	if i.isDir() {
		return mode
	}
	mode &^= linux.S_ISUID
	if mode&linux.ModeGroupExec != 0 || !creds.InGroup(kgid) && !creds.HasCapabilityOnFile(linux.CAP_FSETID, kuid, kgid) {
		mode &^= linux.S_ISGID
	}
	return mode
}

// killPrivs takes file capabilities away, as every write does, and set-user-ID and set-group-ID unless the writer is privileged.
// i.mu is held.
func (i *inode) killPrivs(ctx context.Context) error {
	a := i.ei.Attr()
	if a.Mode&(linux.S_ISUID|linux.S_ISGID) != 0 {
		creds := auth.CredentialsFromContext(ctx)
		mode := a.Mode &^ linux.S_IFMT
		if m := i.dropSetID(creds, mode, auth.KUID(a.UID), auth.KGID(a.GID)); m != mode && !creds.HasRootCapability(linux.CAP_FSETID) {
			if err := i.ei.SetAttr(ext4.SetAttr{Mask: ext4.SetMode, Mode: m}); err != nil {
				return toErr(err)
			}
		}
	}
	return i.killCaps()
}

// killCaps removes file capabilities. i.mu is held.
func (i *inode) killCaps() error {
	if i.noCaps.Load() {
		return nil
	}
	if err := i.ei.RemoveXattr(linux.XATTR_SECURITY_CAPABILITY); err != nil && !isErrno(err, syscall.ENODATA) {
		return toErr(err)
	}
	i.noCaps.Store(true)
	return nil
}

// relatimeAge is how old an access time may get before a read renews it although nothing was written since.
const relatimeAge = 24 * 60 * 60 // seconds

func before(a, b ext4.Timespec) bool {
	return a.Sec < b.Sec || a.Sec == b.Sec && a.Nsec < b.Nsec
}

// touchAtime renews the access time as Linux's default, relatime, does: once after every change, and once a day.
func (i *inode) touchAtime(ctx context.Context, mnt *vfs.Mount) {
	if mnt.Options().Flags.NoATime {
		return
	}
	a := i.ei.Attr()
	if a.Flags&ext4.FlagNoAtime != 0 {
		return
	}
	if before(a.Mtime, a.Atime) && before(a.Ctime, a.Atime) && i.fs.clock.Now().Seconds()-a.Atime.Sec < relatimeAge {
		return
	}
	if i.fs.vol.FS.ReadOnly() || mnt.CheckBeginWrite() != nil {
		return
	}
	defer mnt.EndWrite()
	if err := i.ei.Touch(ext4.SetAtime); err != nil {
		ctx.Warningf("ext4: access time of inode %d: %v", i.ino, err)
	}
}
