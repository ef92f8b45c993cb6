package ext4

import "time"

// Options of Open.
type Options struct {
	// ReadOnly opens without writing a byte; every modifying call then gives EROFS.
	ReadOnly bool
	// Now is the clock of timestamps; time.Now when nil.
	Now func() time.Time
	// CacheBytes bounds the clean metadata blocks kept in memory (32 MiB when 0).
	CacheBytes int64
	// Durable makes what was synced survive a lost host: the device is flushed where
	// the journal needs it. Without it only the order of writes is kept, and what was
	// synced survives a killed process.
	Durable bool
	// CommitInterval is the age at which changes are committed without a Sync (5 s when 0).
	CommitInterval time.Duration
	// NoDiscard keeps freed space allocated in the host file.
	NoDiscard bool
	// BeforeFree is called when blocks have left the map of ino at file bytes
	// [off, off+n) and before anything can reuse them (truncate, punch, delete), so
	// that translations handed out from Extents can be invalidated. No lock that
	// Extents, Attr or Size take is held; the hook must not call data-modifying
	// methods of the same inode, nor ReadAt.
	BeforeFree func(ino *Inode, off, n int64)
}

// Timespec is a point of time since the epoch; Nsec is in [0, 1e9).
type Timespec struct {
	Sec  int64
	Nsec uint32
}

// Attr are the attributes of an inode.
type Attr struct {
	Mode                 uint16 // S_IFMT type | 12 permission bits
	UID, GID             uint32
	Nlink                uint32 // 1 for directories of more links than the format counts
	Size                 int64
	Blocks512            int64 // allocated space in units of 512 bytes
	Atime, Mtime         Timespec
	Ctime, Crtime        Timespec // Crtime is zero in 128-byte inodes
	RdevMajor, RdevMinor uint32
	Flags                uint32 // inode flags as in lsattr: FlagImmutable, FlagAppend …
}

// Inode flags of Attr.Flags that callers act upon (values of the format and of
// FS_IOC_GETFLAGS).
const (
	FlagSync      = 0x8
	FlagImmutable = 0x10
	FlagAppend    = 0x20
	FlagNoDump    = 0x40
	FlagNoAtime   = 0x80
	FlagDirSync   = 0x10000
)

// FlagsSettable are the bits SetAttr with SetFlags may change; others are kept.
const FlagsSettable = FlagSync | FlagImmutable | FlagAppend | FlagNoDump | FlagNoAtime | FlagDirSync

// Bits of SetAttr.Mask and of Touch.
const (
	SetMode = 1 << iota
	SetUID
	SetGID
	SetAtime
	SetMtime
	SetCtime
	SetFlags
)

// SetAttr is a change of attributes: the fields whose Set… bit is in Mask.
// Ctime becomes now unless SetCtime is given.
type SetAttr struct {
	Mask                uint32
	Mode                uint16 // permission bits; the type is kept
	UID, GID            uint32
	Atime, Mtime, Ctime Timespec
	Flags               uint32
}

// New describes an inode to be made. The caller has applied umask and set-gid
// rules already.
type New struct {
	Mode                 uint16 // S_IFMT type | permissions; no type means regular file
	UID, GID             uint32
	RdevMajor, RdevMinor uint32 // devices
	Target               string // symlinks, 1 to BlockSize-1 bytes
}

// File types of Dirent.Type: the format's own values, 0 where the volume stores none.
const (
	TypeUnknown = 0
	TypeRegular = 1
	TypeDir     = 2
	TypeChar    = 3
	TypeBlock   = 4
	TypeFIFO    = 5
	TypeSocket  = 6
	TypeSymlink = 7
)

// Dirent is one name of a directory.
type Dirent struct {
	Name string
	Ino  uint32
	Type uint8 // TypeRegular …
	// Next is the cookie that continues after this entry.
	Next int64
}

// Extent is a piece of a file.
type Extent struct {
	FileOff int64
	DevOff  int64 // undefined for a hole
	Len     int64 // bytes
	// Hole is set where nothing is stored (hole or unwritten): it reads as zeros.
	Hole bool
}

// Statfs is what statfs(2) tells.
type Statfs struct {
	BlockSize             int64
	Blocks, Free, Avail   uint64 // in blocks; Blocks without the format's own overhead
	Inodes, FreeInodes    uint64
	NameLen               int64
	UUID                  [16]byte
	Label                 string
	TotalBlocks, Overhead uint64
}

// Flags of Rename, with the values of renameat2(2).
const (
	RenameNoReplace = 1
	RenameExchange  = 2
	RenameWhiteout  = 4
)

// Flags of SetXattr, with the values of setxattr(2).
const (
	XattrCreate  = 1
	XattrReplace = 2
)

// Modes of Fallocate, with the values of fallocate(2). Anything else is EOPNOTSUPP.
const (
	FallocKeepSize  = 0x1
	FallocPunchHole = 0x2
	FallocZeroRange = 0x10
)

// MaxNameLen is the longest name in bytes.
const MaxNameLen = 255

// MaxLinks is the largest link count of a file, and of a directory without dir_nlink.
const MaxLinks = 65000
