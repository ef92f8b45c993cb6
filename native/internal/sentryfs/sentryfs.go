// Package sentryfs shows an ext4 volume inside the Sentry: the glue between gVisor's virtual file system and the format
// driver in internal/ext4. It knows nothing of the format's bytes; ext4 knows nothing of gVisor.
//
// The volume belongs to this process alone, so the tree of dentries may be cached for as long as it likes and is by
// definition coherent with the volume. File contents are never cached here: reads and writes move bytes between the
// guest's memory and the image file at the extent's address, and mmap hands out the image file's own pages, so that the
// host's page cache is the only cache and all ways of looking at a file agree.
//
// # Freed blocks and mappings
//
// A page that a guest has mapped must never belong to another file. Whoever frees blocks of a live inode goes through
// inode.truncate or inode.punch, under inode.mu:
//
//  1. inode.mapEnd is lowered below dataMu, so that no new translation of a doomed page can be made;
//  2. every existing translation of those pages is invalidated (this waits for accesses in progress, and drops the
//     references that address spaces held on the pages);
//  3. the blocks are freed below dataMu held for writing, which waits for reads through extents looked up before.
//
// Punching a hole into a file that has mappings writes zeros instead of freeing. A deleted inode is freed when the last
// reference to its last dentry goes; a mapping holds one, so there is none left. What remains could only be a
// reference without a translation, that is mm.MemoryManager.Pin: its only callers are the device proxies for GPUs, TPUs
// and RDMA, which gvx never enables.
//
// # Volumes over a backing file
//
// The device may be a delta (blockdev.Layered): blocks that were not written yet are read and mapped from the backing file, never
// for writing. A block that is the volume's own stays so, and whoever makes it so invalidates the translations of its page
// afterwards (staleMappings), since they may be of the backing file: a translation is made and installed under
// activeMu, which the invalidation waits for, so it is either found or made later, when the block is present. That cannot be done in
// a fault, which holds activeMu. So a file that has had a shared writable mapping is never mapped from the backing file: AddMapping
// takes back what was, and each fault makes its blocks the volume's own first.
//
// # Locks, in order
//
//	filesystem.mu                 the dentry tree
//	  dentry.childMu              the map of a directory's cached children, while filesystem.mu is held for reading
//	  inode.mu                    size changes, appends, attribute changes that read first
//	    regularFileFD.offMu is taken before inode.mu
//	    inode.mapsMu              mappings of the inode
//	      (mm locks: activeMu)
//	        inode.dataMu          blocks of the inode are not freed while it is held for reading
//	          (ext4's own locks)
//	filesystem.inodesMu           the table of inodes; nothing is taken below it
package sentryfs

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/fsutil"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/ktime"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/ext4"
)

// Name is the name of the file system type, in /proc/filesystems and /proc/mounts.
const Name = "ext4"

// maxCachedDentries bounds the dentries kept beyond those in use.
const maxCachedDentries = 128 << 10

// Volume is an open volume; a pointer to one goes to FilesystemType.GetFilesystem as GetFilesystemOptions.InternalData.
// The file system made of it never closes it: after an unmount the same Volume can be mounted again.
type Volume struct {
	// Key names the volume across a checkpoint: what RegisterVolume was given for it when restoring. Unique in a sandbox.
	Key string
	// FS is the open file system on Dev.
	FS *ext4.FS
	// Dev is the device FS is on; its FD is where data is read, written and mapped.
	Dev blockdev.Device

	mu      sync.Mutex
	mounted map[*filesystem]struct{} // below mu
}

// Close closes the volume, whether it is still mounted or not: it is for the end of the sandbox, when no guest task is left. Nothing
// may use the volume afterwards.
func (v *Volume) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var errs []error
	for fs := range v.mounted {
		fs.inodesMu.Lock()
		for _, i := range fs.inodes {
			if err := i.zeroTail(math.MaxInt64); err != nil {
				errs = append(errs, fmt.Errorf("inode %d: %w", i.ino, err))
			}
		}
		fs.inodesMu.Unlock()
	}
	return errors.Join(append(errs, v.FS.Close())...)
}

func (v *Volume) setMounted(fs *filesystem, mounted bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !mounted {
		delete(v.mounted, fs)
		return
	}
	if v.mounted == nil {
		v.mounted = make(map[*filesystem]struct{})
	}
	v.mounted[fs] = struct{}{}
}

// FilesystemType implements vfs.FilesystemType.
type FilesystemType struct{}

// filesystem implements vfs.FilesystemImpl.
type filesystem struct {
	vfsfs vfs.Filesystem

	// vol is the volume; it changes only in a restore.
	vol *Volume

	// devMinor is the minor device number of the file system. Immutable.
	devMinor uint32

	// clock tells how old access times are. Immutable.
	clock ktime.Clock

	// mf maps pages of the image file.
	mf fsutil.MmapCachedFile

	// layered is vol.Dev if that has a backing file, whose pages baseMF maps.
	layered blockdev.Layered
	baseMF  fsutil.MmapCachedFile

	// zeroMF and zeros are a page of zeros for holes of a read-only volume, made when first needed; below zeroMu.
	zeroMu sync.Mutex
	zeroMF *pgalloc.MemoryFile
	zeros  memmap.FileRange

	// rootNS interprets the ids of access control lists. Immutable.
	rootNS *auth.UserNamespace

	// mu serializes changes of the dentry tree.
	mu sync.RWMutex

	// ancestryMu additionally protects dentry.parent and dentry.name, for observers that cannot take mu.
	ancestryMu sync.RWMutex

	// root is the root dentry; the file system holds a reference on it. Immutable.
	root *dentry

	// dentries counts the dentries in the tree.
	dentries atomic.Int64

	inodesMu sync.Mutex
	// inodes has the inode of every dentry, by number; below inodesMu.
	inodes map[uint32]*inode
}

var _ vfs.FilesystemImpl = (*filesystem)(nil)

// Name implements vfs.FilesystemType.Name.
func (*FilesystemType) Name() string { return Name }

// Release implements vfs.FilesystemType.Release.
func (*FilesystemType) Release(context.Context) {}

// GetFilesystem implements vfs.FilesystemType.GetFilesystem. opts.InternalData must be a *Volume. Of the options in opts.Data
// none has a meaning here; a guest cannot get here at all.
func (t *FilesystemType) GetFilesystem(ctx context.Context, v *vfs.VirtualFilesystem, creds *auth.Credentials, _ string, opts vfs.GetFilesystemOptions) (*vfs.Filesystem, *vfs.Dentry, error) {
	vol, ok := opts.InternalData.(*Volume)
	if !ok || vol == nil || vol.FS == nil {
		ctx.Warningf("ext4: mount without a volume: InternalData is %T", opts.InternalData)
		return nil, nil, linuxerr.EINVAL
	}
	minor, err := v.GetAnonBlockDevMinor()
	if err != nil {
		return nil, nil, err
	}
	fs := &filesystem{
		vol:      vol,
		devMinor: minor,
		clock:    ktime.RealtimeClockFromContext(ctx),
		zeroMF:   pgalloc.MemoryFileFromContext(ctx),
		rootNS:   creds.UserNamespace.Root(),
		inodes:   make(map[uint32]*inode),
	}
	fs.setDevice()
	fs.vfsfs.Init(v, t, fs)
	root := vol.FS.Root()
	root.IncRef()
	fs.root = fs.newDentry(fs.inodeOf(root))
	fs.root.refs.Store(2) // ours and the caller's
	vol.setMounted(fs, true)
	return &fs.vfsfs, &fs.root.vfsd, nil
}

// Release implements vfs.FilesystemImpl.Release: it lets go of every inode and syncs; the volume stays open.
func (fs *filesystem) Release(ctx context.Context) {
	fs.vfsfs.VirtualFilesystem().PutAnonBlockDevMinor(fs.devMinor)
	fs.mu.Lock()
	fs.dropTreeLocked(ctx, fs.root)
	fs.mu.Unlock()
	if fs.zeros.Length() != 0 {
		fs.zeroMF.DecRef(fs.zeros)
	}
	fs.vol.setMounted(fs, false)
	if err := fs.vol.FS.Sync(); err != nil {
		log.Warningf("ext4: sync of volume %q at unmount: %v", fs.vol.Key, err)
	}
}

// Sync implements vfs.FilesystemImpl.Sync.
func (fs *filesystem) Sync(context.Context) error { return toErr(fs.vol.FS.Sync()) }

// MountOptions implements vfs.FilesystemImpl.MountOptions.
func (fs *filesystem) MountOptions() string { return "" }

func (fs *filesystem) statFS() linux.Statfs {
	s := fs.vol.FS.Statfs()
	var fsid [2]int32
	for i := range 16 {
		fsid[i/4%2] ^= int32(s.UUID[i]) << (8 * (i % 4))
	}
	return linux.Statfs{
		Type:            linux.EXT_SUPER_MAGIC,
		BlockSize:       s.BlockSize,
		FragmentSize:    s.BlockSize,
		Blocks:          s.Blocks,
		BlocksFree:      s.Free,
		BlocksAvailable: s.Avail,
		Files:           s.Inodes,
		FilesFree:       s.FreeInodes,
		FSID:            fsid,
		NameLength:      uint64(s.NameLen),
	}
}

// setDevice sets what follows from vol.Dev.
func (fs *filesystem) setDevice() {
	fs.mf.SetFD(fs.vol.Dev.FD())
	if l, ok := fs.vol.Dev.(blockdev.Layered); ok {
		fs.layered = l
		fs.baseMF.SetFD(l.BaseFD())
	}
}

// mappable tells whether files can be mapped: the image's pages are the files' pages.
func (fs *filesystem) mappable() bool {
	return fs.vol.Dev.FD() >= 0 && fs.vol.FS.BlockSize()%hostarch.PageSize == 0
}

// zeroPage returns a range of one page of zeros in zeroMF.
func (fs *filesystem) zeroPage(ctx context.Context) (memmap.FileRange, error) {
	fs.zeroMu.Lock()
	defer fs.zeroMu.Unlock()
	if fs.zeros.Length() == 0 {
		if fs.zeroMF == nil {
			return memmap.FileRange{}, linuxerr.ENOMEM
		}
		fr, err := fs.zeroMF.Allocate(hostarch.PageSize, pgalloc.AllocOpts{MemCgID: pgalloc.MemoryCgroupIDFromContext(ctx)})
		if err != nil {
			return memmap.FileRange{}, err
		}
		fs.zeros = fr
	}
	return fs.zeros, nil
}
