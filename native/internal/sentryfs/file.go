package sentryfs

import (
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
)

// fileDescription is what the file descriptions of regular files and directories share.
type fileDescription struct {
	vfsfd vfs.FileDescription
	vfs.FileDescriptionDefaultImpl
	vfs.LockFD
}

func (fd *fileDescription) dentry() *dentry { return fd.vfsfd.Dentry().Impl().(*dentry) }

func (fd *fileDescription) inode() *inode { return fd.dentry().inode }

// modify calls fn when the mount may be written to.
func (fd *fileDescription) modify(fn func() error) error {
	mnt := fd.vfsfd.Mount()
	if err := mnt.CheckBeginWrite(); err != nil {
		return err
	}
	defer mnt.EndWrite()
	return fn()
}

// Stat implements vfs.FileDescriptionImpl.Stat.
func (fd *fileDescription) Stat(context.Context, vfs.StatOptions) (linux.Statx, error) {
	var stat linux.Statx
	fd.inode().statTo(&stat)
	return stat, nil
}

// SetStat implements vfs.FileDescriptionImpl.SetStat.
func (fd *fileDescription) SetStat(ctx context.Context, opts vfs.SetStatOptions) error {
	return fd.modify(func() error { return fd.inode().setStat(ctx, auth.CredentialsFromContext(ctx), &opts) })
}

// StatFS implements vfs.FileDescriptionImpl.StatFS.
func (fd *fileDescription) StatFS(context.Context) (linux.Statfs, error) {
	return fd.inode().fs.statFS(), nil
}

// ListXattr implements vfs.FileDescriptionImpl.ListXattr.
func (fd *fileDescription) ListXattr(ctx context.Context, size uint64) ([]string, error) {
	return fd.inode().listXattr(auth.CredentialsFromContext(ctx), size)
}

// GetXattr implements vfs.FileDescriptionImpl.GetXattr.
func (fd *fileDescription) GetXattr(ctx context.Context, opts vfs.GetXattrOptions) (string, error) {
	return fd.inode().getXattr(auth.CredentialsFromContext(ctx), &opts)
}

// SetXattr implements vfs.FileDescriptionImpl.SetXattr.
func (fd *fileDescription) SetXattr(ctx context.Context, opts vfs.SetXattrOptions) error {
	return fd.modify(func() error { return fd.inode().setXattr(auth.CredentialsFromContext(ctx), &opts) })
}

// RemoveXattr implements vfs.FileDescriptionImpl.RemoveXattr.
func (fd *fileDescription) RemoveXattr(ctx context.Context, name string) error {
	return fd.modify(func() error { return fd.inode().removeXattr(auth.CredentialsFromContext(ctx), name) })
}

// GetPosixACL implements vfs.FileDescriptionImpl.GetPosixACL.
func (fd *fileDescription) GetPosixACL(_ context.Context, t vfs.ACLType) (*vfs.PosixACL, error) {
	return fd.inode().posixACL(t)
}

// SetPosixACL implements vfs.FileDescriptionImpl.SetPosixACL.
func (fd *fileDescription) SetPosixACL(ctx context.Context, t vfs.ACLType, acl *vfs.PosixACL, clearSGID bool) (list *vfs.PosixACL, mode linux.FileMode, err error) {
	err = fd.modify(func() (err error) {
		i := fd.inode()
		i.mu.Lock()
		defer i.mu.Unlock()
		list, mode, err = i.setPosixACLLocked(auth.CredentialsFromContext(ctx), t, acl, clearSGID)
		return err
	})
	return list, mode, err
}

// Sync implements vfs.FileDescriptionImpl.Sync. On a volume that an error has made read-only it fails, unlike on one that was
// mounted so: what was written may be lost.
func (fd *fileDescription) Sync(_ context.Context, opts vfs.SyncOptions) error {
	return toErr(fd.inode().ei.Sync(opts.DataOnly))
}
