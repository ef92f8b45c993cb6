package sentryfs

import (
	"math"
	"sync"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"gvx.dev/gvx/native/internal/ext4"
)

// directoryFD is an open directory.
type directoryFD struct {
	fileDescription
	vfs.DirectoryFileDescriptionDefaultImpl

	mu sync.Mutex
	// off is the offset: 0 before ".", 1 before "..", and firstCookie plus ext4's cookie after them. Below mu.
	off int64
}

const firstCookie = 2

// Release implements vfs.FileDescriptionImpl.Release.
func (fd *directoryFD) Release(context.Context) {}

// direntBatch is how many entries are read at a time. They are handed out without ext4's locks, since the callback copies to
// the guest's memory, which may be a mapping of a file of this very volume.
const direntBatch = 256

// IterDirents implements vfs.FileDescriptionImpl.IterDirents.
func (fd *directoryFD) IterDirents(ctx context.Context, cb vfs.IterDirentsCallback) error {
	d := fd.dentry()
	i := d.inode
	i.touchAtime(ctx, fd.vfsfd.Mount())
	fd.mu.Lock()
	defer fd.mu.Unlock()
	if fd.off == 0 {
		if err := cb.Handle(vfs.Dirent{Name: ".", Type: linux.DT_DIR, Ino: uint64(i.ino), NextOff: 1}); err != nil {
			return err
		}
		fd.off = 1
	}
	if fd.off == 1 {
		ino := i.ino
		if p := d.parent.Load(); p != nil {
			ino = p.inode.ino
		}
		if err := cb.Handle(vfs.Dirent{Name: "..", Type: linux.DT_DIR, Ino: uint64(ino), NextOff: firstCookie}); err != nil {
			return err
		}
		fd.off = firstCookie
	}
	if d.dead.Load() {
		return nil
	}
	batch := make([]ext4.Dirent, 0, direntBatch)
	for {
		batch = batch[:0]
		err := i.ei.ReadDir(fd.off-firstCookie, func(e ext4.Dirent) bool {
			batch = append(batch, e)
			return len(batch) < direntBatch
		})
		if err != nil {
			return toErr(err)
		}
		for _, e := range batch {
			next := e.Next
			if next > math.MaxInt64-firstCookie {
				next = math.MaxInt64 - firstCookie // the end of every directory
			}
			next += firstCookie
			if err := cb.Handle(vfs.Dirent{Name: e.Name, Type: direntType(e.Type), Ino: uint64(e.Ino), NextOff: next}); err != nil {
				return err
			}
			fd.off = next
		}
		if len(batch) < direntBatch {
			return nil
		}
	}
}

// Seek implements vfs.FileDescriptionImpl.Seek. Offsets are those that getdents gave.
func (fd *directoryFD) Seek(_ context.Context, offset int64, whence int32) (int64, error) {
	fd.mu.Lock()
	defer fd.mu.Unlock()
	switch whence {
	case linux.SEEK_SET:
	case linux.SEEK_CUR:
		offset += fd.off
	case linux.SEEK_END:
		// As in ext4, past every entry.
		if offset > 0 {
			return 0, linuxerr.EINVAL
		}
		offset += math.MaxInt64
	default:
		return 0, linuxerr.EINVAL
	}
	if offset < 0 {
		return 0, linuxerr.EINVAL
	}
	fd.off = offset
	return offset, nil
}
