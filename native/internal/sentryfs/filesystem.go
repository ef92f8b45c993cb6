package sentryfs

import (
	"strconv"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/refs"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/socket/unix/transport"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"gvx.dev/gvx/native/internal/ext4"
)

// step resolves rp's next component in directory d. It returns the dentry to go on from, which stays valid while fs.mu is
// held, and whether a symbolic link was followed to get there. Compare Linux's fs/namei.c:walk_component().
//
// Preconditions: fs.mu is held; !rp.Done().
func (fs *filesystem) step(ctx context.Context, rp *vfs.ResolvingPath, d *dentry) (*dentry, bool, error) {
	if !d.inode.isDir() {
		return nil, false, linuxerr.ENOTDIR
	}
	if err := d.inode.checkPermissions(rp.Credentials(), vfs.MayExec); err != nil {
		return nil, false, err
	}
	name := rp.Component()
	if name == "." {
		rp.Advance()
		return d, false, nil
	}
	if name == ".." {
		parent := d.parent.Load()
		if isRoot, err := rp.CheckRoot(ctx, &d.vfsd); err != nil {
			return nil, false, err
		} else if isRoot || parent == nil {
			rp.Advance()
			return d, false, nil
		}
		if err := rp.CheckMount(ctx, &parent.vfsd); err != nil {
			return nil, false, err
		}
		rp.Advance()
		return parent, false, nil
	}
	if len(name) > ext4.MaxNameLen {
		return nil, false, linuxerr.ENAMETOOLONG
	}
	if d.dead.Load() {
		return nil, false, linuxerr.ENOENT // a removed directory is empty
	}
	child, err := d.lookup(name)
	if err != nil {
		return nil, false, err
	}
	if err := rp.CheckMount(ctx, &child.vfsd); err != nil {
		return nil, false, err
	}
	if child.inode.isSymlink() && rp.ShouldFollowSymlink() {
		target, err := child.inode.ei.Readlink()
		if err != nil {
			return nil, false, toErr(err)
		}
		child.inode.touchAtime(ctx, rp.Mount())
		followed, err := rp.HandleSymlink(target)
		return d, followed, err
	}
	rp.Advance()
	return child, false, nil
}

// walkParent resolves all but the last component of rp to a directory that may be searched.
//
// Preconditions: fs.mu is held; !rp.Done().
func (fs *filesystem) walkParent(ctx context.Context, rp *vfs.ResolvingPath, d *dentry) (*dentry, error) {
	for !rp.Final() {
		next, _, err := fs.step(ctx, rp, d)
		if err != nil {
			return nil, err
		}
		d = next
	}
	if !d.inode.isDir() {
		return nil, linuxerr.ENOTDIR
	}
	return d, d.inode.checkPermissions(rp.Credentials(), vfs.MayExec)
}

// resolve resolves rp to an existing file.
//
// Preconditions: fs.mu is held.
func (fs *filesystem) resolve(ctx context.Context, rp *vfs.ResolvingPath) (*dentry, error) {
	d := rp.Start().Impl().(*dentry)
	if rp.Done() && d.inode.isSymlink() && rp.ShouldFollowSymlink() {
		// A path without components that starts at a symbolic link, as /proc/[pid]/fd gives them.
		target, err := d.inode.ei.Readlink()
		if err != nil {
			return nil, toErr(err)
		}
		d.inode.touchAtime(ctx, rp.Mount())
		if _, err := rp.HandleSymlink(target); err != nil {
			return nil, err
		}
	}
	for !rp.Done() {
		next, _, err := fs.step(ctx, rp, d)
		if err != nil {
			return nil, err
		}
		d = next
	}
	if rp.MustBeDir() && !d.inode.isDir() {
		return nil, linuxerr.ENOTDIR
	}
	return d, nil
}

// with resolves rp and calls fn with the dentry, holding fs.mu for reading.
func (fs *filesystem) with(ctx context.Context, rp *vfs.ResolvingPath, fn func(*dentry) error) error {
	defer fs.trim(ctx)
	fs.mu.RLock()
	defer fs.mu.RUnlock()
	d, err := fs.resolve(ctx, rp)
	if err != nil {
		return err
	}
	return fn(d)
}

// withRef resolves rp and calls fn with the dentry, a reference on it and without locks.
func (fs *filesystem) withRef(ctx context.Context, rp *vfs.ResolvingPath, fn func(*dentry) error) error {
	var d *dentry
	err := fs.with(ctx, rp, func(found *dentry) error {
		d = found
		d.IncRef()
		return nil
	})
	if err != nil {
		return err
	}
	defer d.DecRef(ctx)
	return fn(d)
}

// modify is withRef for changes: the mount must be writable.
func (fs *filesystem) modify(ctx context.Context, rp *vfs.ResolvingPath, fn func(*dentry) error) error {
	return fs.withRef(ctx, rp, func(d *dentry) error {
		if err := rp.Mount().CheckBeginWrite(); err != nil {
			return err
		}
		defer rp.Mount().EndWrite()
		return fn(d)
	})
}

// createAt checks that rp may be created, and has create do so; allowed, where not nil, is asked before write permission is. Compare Linux's fs/namei.c:filename_create().
//
// Preconditions: !rp.Done(); the last component is not to be followed when it is a symbolic link.
func (fs *filesystem) createAt(ctx context.Context, rp *vfs.ResolvingPath, dir bool, allowed func() error, create func(parent *dentry, name string) error) error {
	defer fs.trim(ctx)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	parent, err := fs.walkParent(ctx, rp, rp.Start().Impl().(*dentry))
	if err != nil {
		return err
	}
	// The order of checks matters: existence, then whether the mount is writable, then write permission.
	name := rp.Component()
	if name == "." || name == ".." {
		return linuxerr.EEXIST
	}
	if len(name) > ext4.MaxNameLen {
		return linuxerr.ENAMETOOLONG
	}
	if parent.dead.Load() {
		return linuxerr.ENOENT
	}
	if _, err := parent.lookup(name); err == nil {
		return linuxerr.EEXIST
	} else if !linuxerr.Equals(linuxerr.ENOENT, err) {
		return err
	}
	if !dir && rp.MustBeDir() {
		return linuxerr.ENOENT
	}
	mnt := rp.Mount()
	if err := mnt.CheckBeginWrite(); err != nil {
		return err
	}
	defer mnt.EndWrite()
	if allowed != nil {
		if err := allowed(); err != nil {
			return err
		}
	}
	if err := parent.inode.checkPermissions(rp.Credentials(), vfs.MayWrite); err != nil {
		return err
	}
	if err := create(parent, name); err != nil {
		return err
	}
	ev := uint32(linux.IN_CREATE)
	if dir {
		ev |= linux.IN_ISDIR
	}
	parent.inode.watches.Notify(ctx, name, ev, 0, vfs.InodeEvent, false)
	return nil
}

// newInode is the description of an inode to be made in directory parent with this mode (with its type): group and
// set-group-ID bit are inherited as in Linux's fs/inode.c:inode_init_owner(). The lists are what parent's default access control
// list makes of it.
func newInode(creds *auth.Credentials, parent *inode, mode linux.FileMode) (ext4.New, acls) {
	n := ext4.New{Mode: uint16(mode), UID: uint32(creds.EffectiveKUID), GID: uint32(creds.EffectiveKGID)}
	if p := parent.ei.Attr(); p.Mode&linux.S_ISGID != 0 {
		n.GID = p.GID
		const execSGID = linux.S_ISGID | linux.ModeGroupExec
		switch {
		case mode.FileType() == linux.S_IFDIR:
			n.Mode |= linux.S_ISGID
		case mode&execSGID == execSGID && !creds.InGroup(auth.KGID(n.GID)) && !creds.HasSelfCapability(linux.CAP_FSETID):
			n.Mode &^= linux.S_ISGID
		}
	}
	var lists acls
	if def := parent.acl().def; def != nil && mode.FileType() != linux.S_IFLNK {
		list := def.MaskNewFileMode(n.Mode)
		perm, equiv := list.Mode()
		if !equiv {
			lists.access = &list
		}
		n.Mode = n.Mode&^linux.PermissionsMask | perm&linux.PermissionsMask
		if mode.FileType() == linux.S_IFDIR {
			lists.def = def
		}
	}
	return n, lists
}

// create makes the inode n as parent/name and puts its dentry into the tree.
//
// Preconditions: fs.mu is held for writing; the name is free.
func (fs *filesystem) create(ctx context.Context, parent *dentry, name string, n ext4.New, lists acls, ep transport.BoundEndpoint) (*dentry, error) {
	ei, err := parent.inode.ei.Create(name, n)
	if err != nil {
		return nil, toErr(err)
	}
	i := fs.inodeOf(ei)
	i.ep = ep
	i.noCaps.Store(true)
	child := fs.newDentry(i)
	parent.insertChildLocked(child, name)
	if err := i.initACLs(lists); err != nil {
		// A file without the access control list it should have must not stay.
		remove := parent.inode.ei.Unlink
		if i.isDir() {
			remove = parent.inode.ei.Rmdir
		}
		if rerr := remove(name); rerr == nil {
			child.IncRef()
			child.unlinkLocked()
			child.DecRef(ctx)
		}
		return nil, err
	}
	return child, nil
}

// initACLs gives a new inode the lists it inherits.
func (i *inode) initACLs(lists acls) error {
	i.acls.Store(&acls{})
	if lists.access != nil {
		if err := i.storeACL(vfs.AccessACL, lists.access); err != nil {
			return err
		}
	}
	if lists.def != nil {
		return i.storeACL(vfs.DefaultACL, lists.def)
	}
	return nil
}

// AccessAt implements vfs.FilesystemImpl.AccessAt.
func (fs *filesystem) AccessAt(ctx context.Context, rp *vfs.ResolvingPath, creds *auth.Credentials, ats vfs.AccessTypes) error {
	return fs.with(ctx, rp, func(d *dentry) error {
		if err := d.inode.checkPermissions(creds, ats); err != nil {
			return err
		}
		if ats.MayWrite() && rp.Mount().ReadOnly() {
			return linuxerr.EROFS
		}
		return nil
	})
}

// GetDentryAt implements vfs.FilesystemImpl.GetDentryAt.
func (fs *filesystem) GetDentryAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.GetDentryOptions) (*vfs.Dentry, error) {
	var found *vfs.Dentry
	err := fs.with(ctx, rp, func(d *dentry) error {
		if opts.CheckSearchable {
			if !d.inode.isDir() {
				return linuxerr.ENOTDIR
			}
			if err := d.inode.checkPermissions(rp.Credentials(), vfs.MayExec); err != nil {
				return err
			}
		}
		d.IncRef()
		found = &d.vfsd
		return nil
	})
	return found, err
}

// GetParentDentryAt implements vfs.FilesystemImpl.GetParentDentryAt.
func (fs *filesystem) GetParentDentryAt(ctx context.Context, rp *vfs.ResolvingPath) (*vfs.Dentry, error) {
	defer fs.trim(ctx)
	fs.mu.RLock()
	defer fs.mu.RUnlock()
	d, err := fs.walkParent(ctx, rp, rp.Start().Impl().(*dentry))
	if err != nil {
		return nil, err
	}
	d.IncRef()
	return &d.vfsd, nil
}

// LinkAt implements vfs.FilesystemImpl.LinkAt.
func (fs *filesystem) LinkAt(ctx context.Context, rp *vfs.ResolvingPath, vd vfs.VirtualDentry) error {
	var i *inode
	allowed := func() error {
		if rp.Mount() != vd.Mount() {
			return linuxerr.EXDEV // vd may be of another file system type altogether
		}
		i = vd.Dentry().Impl().(*dentry).inode
		a := i.ei.Attr()
		return vfs.MayLink(auth.CredentialsFromContext(ctx), linux.FileMode(a.Mode), i.acl().access, auth.KUID(a.UID), auth.KGID(a.GID))
	}
	return fs.createAt(ctx, rp, false, allowed, func(parent *dentry, name string) error {
		a := i.ei.Attr()
		switch {
		case i.isDir(), a.Flags&(ext4.FlagAppend|ext4.FlagImmutable) != 0:
			return linuxerr.EPERM
		case a.Nlink == 0 && !i.tmpfile.Load():
			return linuxerr.ENOENT
		}
		if err := parent.inode.ei.Link(name, i.ei); err != nil {
			return toErr(err)
		}
		i.incRef()
		parent.insertChildLocked(fs.newDentry(i), name)
		i.watches.Notify(ctx, "", linux.IN_ATTRIB, 0, vfs.InodeEvent, false)
		return nil
	})
}

// MkdirAt implements vfs.FilesystemImpl.MkdirAt.
func (fs *filesystem) MkdirAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.MkdirOptions) error {
	return fs.createAt(ctx, rp, true, nil, func(parent *dentry, name string) error {
		n, lists := newInode(rp.Credentials(), parent.inode, linux.S_IFDIR|opts.Mode.Permissions()|opts.Mode&linux.S_ISVTX)
		_, err := fs.create(ctx, parent, name, n, lists, nil)
		return err
	})
}

// MknodAt implements vfs.FilesystemImpl.MknodAt.
func (fs *filesystem) MknodAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.MknodOptions) error {
	return fs.createAt(ctx, rp, false, nil, func(parent *dentry, name string) error {
		switch opts.Mode.FileType() {
		case linux.S_IFREG, linux.S_IFIFO, linux.S_IFBLK, linux.S_IFCHR, linux.S_IFSOCK:
		default:
			return linuxerr.EINVAL
		}
		n, lists := newInode(rp.Credentials(), parent.inode, opts.Mode)
		n.RdevMajor, n.RdevMinor = opts.DevMajor, opts.DevMinor
		_, err := fs.create(ctx, parent, name, n, lists, opts.Endpoint)
		return err
	})
}

// SymlinkAt implements vfs.FilesystemImpl.SymlinkAt.
func (fs *filesystem) SymlinkAt(ctx context.Context, rp *vfs.ResolvingPath, target string) error {
	return fs.createAt(ctx, rp, false, nil, func(parent *dentry, name string) error {
		n, lists := newInode(rp.Credentials(), parent.inode, linux.S_IFLNK|0o777)
		n.Target = target
		_, err := fs.create(ctx, parent, name, n, lists, nil)
		return err
	})
}

// OpenAt implements vfs.FilesystemImpl.OpenAt.
func (fs *filesystem) OpenAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.OpenOptions) (*vfs.FileDescription, error) {
	switch {
	case opts.Flags&linux.O_TMPFILE != 0:
		return fs.openTmpfile(ctx, rp, opts)
	case opts.Flags&linux.O_CREAT != 0:
		return fs.openCreate(ctx, rp, opts)
	}
	var fd *vfs.FileDescription
	err := fs.withRef(ctx, rp, func(d *dentry) (err error) {
		fd, err = d.open(ctx, rp, &opts, false)
		return err
	})
	return fd, err
}

// openCreate is OpenAt with O_CREAT. Compare Linux's fs/namei.c:open_last_lookups().
func (fs *filesystem) openCreate(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.OpenOptions) (*vfs.FileDescription, error) {
	defer fs.trim(ctx)
	d, created, err := fs.lookupOrCreate(ctx, rp, &opts)
	if err != nil {
		return nil, err
	}
	defer d.DecRef(ctx)
	fd, err := d.open(ctx, rp, &opts, created)
	if err != nil || !created {
		return fd, err
	}
	fd.SetCreated()
	return fd, nil
}

// lookupOrCreate returns the file at rp with a reference, making a regular file where there is none.
func (fs *filesystem) lookupOrCreate(ctx context.Context, rp *vfs.ResolvingPath, opts *vfs.OpenOptions) (d *dentry, created bool, err error) {
	exclusive := opts.Flags&linux.O_EXCL != 0
	start := rp.Start().Impl().(*dentry)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if rp.Done() {
		if rp.MustBeDir() {
			return nil, false, linuxerr.EISDIR
		}
		if exclusive {
			return nil, false, linuxerr.EEXIST
		}
		start.IncRef()
		return start, false, nil
	}
	for {
		parent, err := fs.walkParent(ctx, rp, start)
		if err != nil {
			return nil, false, err
		}
		if rp.MustBeDir() {
			return nil, false, linuxerr.EISDIR
		}
		name := rp.Component()
		child, followed, err := fs.step(ctx, rp, parent)
		switch {
		case followed && exclusive:
			return nil, false, linuxerr.EEXIST
		case followed && err != nil:
			return nil, false, err // the link leads elsewhere: for the VFS to handle
		case followed:
			start = parent
			continue
		case linuxerr.Equals(linuxerr.ENOENT, err):
			if parent.dead.Load() {
				return nil, false, err
			}
			if err := parent.inode.checkPermissions(rp.Credentials(), vfs.MayWrite); err != nil {
				return nil, false, err
			}
			if err := rp.Mount().CheckBeginWrite(); err != nil {
				return nil, false, err
			}
			defer rp.Mount().EndWrite()
			n, lists := newInode(rp.Credentials(), parent.inode, linux.S_IFREG|opts.Mode)
			child, err := fs.create(ctx, parent, name, n, lists, nil)
			if err != nil {
				return nil, false, err
			}
			parent.inode.watches.Notify(ctx, name, linux.IN_CREATE, 0, vfs.PathEvent, false)
			child.IncRef()
			return child, true, nil
		case err != nil:
			return nil, false, err
		case exclusive:
			return nil, false, linuxerr.EEXIST
		}
		child.IncRef()
		return child, false, nil
	}
}

// openTmpfile is OpenAt with O_TMPFILE: rp is a directory, the file has no name yet.
func (fs *filesystem) openTmpfile(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.OpenOptions) (*vfs.FileDescription, error) {
	var d *dentry
	err := fs.modify(ctx, rp, func(dir *dentry) error {
		if !dir.inode.isDir() {
			return linuxerr.ENOTDIR
		}
		if err := dir.inode.checkPermissions(rp.Credentials(), vfs.MayWrite|vfs.MayExec); err != nil {
			return err
		}
		n, lists := newInode(rp.Credentials(), dir.inode, linux.S_IFREG|opts.Mode)
		ei, err := fs.vol.FS.CreateTmp(n)
		if err != nil {
			return toErr(err)
		}
		i := fs.inodeOf(ei)
		i.noCaps.Store(true)
		i.tmpfile.Store(opts.Flags&linux.O_EXCL == 0)
		// The dentry is born dead: it has a place in the tree for its path, and no name there.
		d = &dentry{fs: fs, inode: i, name: "#" + strconv.FormatUint(uint64(i.ino), 10)}
		d.vfsd.Init(d)
		d.refs.Store(1)
		d.dead.Store(true)
		dir.IncRef()
		d.parent.Store(dir)
		rp.VirtualFilesystem().InvalidateDentry(ctx, &d.vfsd)
		return i.initACLs(lists)
	})
	if d != nil {
		defer d.DecRef(ctx)
	}
	if err != nil {
		return nil, err
	}
	opts.Flags &^= linux.O_DIRECTORY | linux.O_EXCL
	return d.open(ctx, rp, &opts, true)
}

// open opens the file of d; fresh tells that the caller has just made it, so that permissions are not checked.
//
// Preconditions: no locks are held (opening a FIFO blocks); the caller holds a reference on d.
func (d *dentry) open(ctx context.Context, rp *vfs.ResolvingPath, opts *vfs.OpenOptions, fresh bool) (*vfs.FileDescription, error) {
	ats := vfs.AccessTypesForOpenFlags(opts)
	i := d.inode
	a := i.ei.Attr()
	if i.isDir() && (opts.Flags&linux.O_CREAT != 0 || ats.MayWrite()) {
		return nil, linuxerr.EISDIR
	}
	if !fresh {
		if err := i.checkPermissions(rp.Credentials(), ats); err != nil {
			return nil, err
		}
		if a.Flags&ext4.FlagAppend != 0 && (ats.MayWrite() && opts.Flags&linux.O_APPEND == 0 || opts.Flags&linux.O_TRUNC != 0) {
			return nil, linuxerr.EPERM
		}
	}
	switch i.fileType {
	case linux.S_IFREG:
		return d.openRegular(ctx, rp, opts, fresh)
	case linux.S_IFDIR:
		if opts.Flags&linux.O_DIRECT != 0 {
			return nil, linuxerr.EINVAL
		}
		fd := &directoryFD{}
		fd.LockFD.Init(&i.locks)
		if err := fd.vfsfd.Init(fd, opts.Flags, rp.Credentials(), rp.Mount(), &d.vfsd, &vfs.FileDescriptionOptions{AllowDirectIO: true}); err != nil {
			return nil, err
		}
		return &fd.vfsfd, nil
	case linux.S_IFLNK:
		return nil, linuxerr.ELOOP // O_PATH is handled above us
	case linux.S_IFIFO:
		return i.openPipe().Open(ctx, rp.Mount(), &d.vfsd, opts.Flags, &i.locks)
	case linux.S_IFCHR, linux.S_IFBLK:
		kind := vfs.CharDevice
		if i.fileType == linux.S_IFBLK {
			kind = vfs.BlockDevice
		}
		return rp.VirtualFilesystem().OpenDeviceSpecialFile(ctx, rp.Mount(), &d.vfsd, kind, a.RdevMajor, a.RdevMinor, opts)
	}
	return nil, linuxerr.ENXIO // sockets
}

// ReadlinkAt implements vfs.FilesystemImpl.ReadlinkAt.
func (fs *filesystem) ReadlinkAt(ctx context.Context, rp *vfs.ResolvingPath) (string, error) {
	var target string
	err := fs.with(ctx, rp, func(d *dentry) (err error) {
		if !d.inode.isSymlink() {
			return linuxerr.EINVAL
		}
		if target, err = d.inode.ei.Readlink(); err != nil {
			return toErr(err)
		}
		d.inode.touchAtime(ctx, rp.Mount())
		return nil
	})
	return target, err
}

// RmdirAt implements vfs.FilesystemImpl.RmdirAt.
func (fs *filesystem) RmdirAt(ctx context.Context, rp *vfs.ResolvingPath) error {
	return fs.removeAt(ctx, rp, true)
}

// UnlinkAt implements vfs.FilesystemImpl.UnlinkAt.
func (fs *filesystem) UnlinkAt(ctx context.Context, rp *vfs.ResolvingPath) error {
	return fs.removeAt(ctx, rp, false)
}

// removeAt removes the directory (dir) or the other file at rp.
func (fs *filesystem) removeAt(ctx context.Context, rp *vfs.ResolvingPath, dir bool) error {
	// References are dropped without fs.mu: they may be the last ones of something mounted on the removed file.
	var toDecRef []refs.RefCounter
	defer func() {
		for _, r := range toDecRef {
			r.DecRef(ctx)
		}
	}()
	fs.mu.Lock()
	defer fs.mu.Unlock()
	parent, err := fs.walkParent(ctx, rp, rp.Start().Impl().(*dentry))
	if err != nil {
		return err
	}
	name := rp.Component()
	switch {
	case dir && name == ".":
		return linuxerr.EINVAL
	case dir && name == "..":
		return linuxerr.ENOTEMPTY
	case name == "." || name == "..":
		return linuxerr.EISDIR
	case len(name) > ext4.MaxNameLen:
		return linuxerr.ENAMETOOLONG
	case parent.dead.Load():
		return linuxerr.ENOENT
	}
	mnt := rp.Mount()
	if err := mnt.CheckBeginWrite(); err != nil {
		return err
	}
	defer mnt.EndWrite()
	child, err := parent.lookup(name)
	if err != nil {
		return err
	}
	if err := parent.inode.mayDelete(rp.Credentials(), child.inode); err != nil {
		return err
	}
	switch {
	case dir && !child.inode.isDir():
		return linuxerr.ENOTDIR
	case !dir && child.inode.isDir():
		return linuxerr.EISDIR
	case !dir && rp.MustBeDir():
		return linuxerr.ENOTDIR
	}
	vfsObj := rp.VirtualFilesystem()
	mntns := vfs.MountNamespaceFromContext(ctx)
	defer mntns.DecRef(ctx)
	if err := vfsObj.PrepareDeleteDentry(mntns, &child.vfsd); err != nil {
		return err
	}
	remove := parent.inode.ei.Unlink
	if dir {
		remove = parent.inode.ei.Rmdir
	}
	if err := remove(name); err != nil {
		vfsObj.AbortDeleteDentry(&child.vfsd)
		return toErr(err)
	}
	child.IncRef()
	toDecRef = append(toDecRef, child)
	child.unlinkLocked()
	if dir {
		// As in Linux the directory itself hears of it when its last reference goes.
		parent.inode.watches.Notify(ctx, name, linux.IN_DELETE|linux.IN_ISDIR, 0, vfs.InodeEvent, true)
	} else {
		vfs.InotifyRemoveChild(ctx, &child.inode.watches, &parent.inode.watches, name)
	}
	toDecRef = append(toDecRef, vfsObj.CommitDeleteDentry(ctx, &child.vfsd)...)
	return nil
}

// RenameAt implements vfs.FilesystemImpl.RenameAt.
func (fs *filesystem) RenameAt(ctx context.Context, rp *vfs.ResolvingPath, oldParentVD vfs.VirtualDentry, oldName string, opts vfs.RenameOptions) error {
	var toDecRef []refs.RefCounter
	defer func() {
		for _, r := range toDecRef {
			r.DecRef(ctx)
		}
	}()
	fs.mu.Lock()
	defer fs.mu.Unlock()
	newParent, err := fs.walkParent(ctx, rp, rp.Start().Impl().(*dentry))
	if err != nil {
		return err
	}
	const known = linux.RENAME_NOREPLACE | linux.RENAME_EXCHANGE | linux.RENAME_WHITEOUT
	exchange := opts.Flags&linux.RENAME_EXCHANGE != 0
	whiteout := opts.Flags&linux.RENAME_WHITEOUT != 0
	noReplace := opts.Flags&linux.RENAME_NOREPLACE != 0
	if opts.Flags&^known != 0 || exchange && (noReplace || whiteout) {
		return linuxerr.EINVAL
	}
	creds := rp.Credentials()
	newName := rp.Component()
	if newName == "." || newName == ".." {
		if noReplace {
			return linuxerr.EEXIST
		}
		return linuxerr.EBUSY
	}
	if len(newName) > ext4.MaxNameLen || len(oldName) > ext4.MaxNameLen {
		return linuxerr.ENAMETOOLONG
	}
	mnt := rp.Mount()
	if mnt != oldParentVD.Mount() {
		return linuxerr.EXDEV
	}
	if err := mnt.CheckBeginWrite(); err != nil {
		return err
	}
	defer mnt.EndWrite()

	oldParent := oldParentVD.Dentry().Impl().(*dentry)
	if oldParent.dead.Load() || newParent.dead.Load() {
		return linuxerr.ENOENT
	}
	// The order of checks is that of Linux's fs/namei.c:do_renameat2() and vfs_rename(). A mount point is renamed itself, not
	// what is mounted on it: no rp.CheckMount.
	renamed, err := oldParent.lookup(oldName)
	if err != nil {
		return err
	}
	replaced, err := newParent.lookup(newName)
	switch {
	case err != nil && !linuxerr.Equals(linuxerr.ENOENT, err):
		return err
	case err == nil && noReplace:
		return linuxerr.EEXIST
	case err != nil && exchange:
		return linuxerr.ENOENT
	case exchange && !replaced.inode.isDir() && rp.MustBeDir(),
		!renamed.inode.isDir() && (opts.MustBeDir || !exchange && rp.MustBeDir()):
		return linuxerr.ENOTDIR
	case renamed == newParent || renamed.isAncestorOf(newParent):
		return linuxerr.EINVAL
	case replaced != nil && replaced.isAncestorOf(renamed):
		if exchange {
			return linuxerr.EINVAL
		}
		return linuxerr.ENOTEMPTY
	case replaced != nil && renamed.inode == replaced.inode:
		return nil // two names of the same file stay as they are
	}
	if err := fs.mayRename(creds, oldParent, newParent, renamed, replaced, exchange); err != nil {
		return err
	}

	vfsObj := rp.VirtualFilesystem()
	mntns := vfs.MountNamespaceFromContext(ctx)
	defer mntns.DecRef(ctx)
	var replacedVFSD *vfs.Dentry
	if replaced != nil {
		replacedVFSD = &replaced.vfsd
	}
	handle, err := vfsObj.PrepareRenameDentry(mntns, &renamed.vfsd, replacedVFSD)
	if err != nil {
		return err
	}
	vfsObj.RenameBegin(&handle)
	// Linux's flags have the values of ext4's.
	if err := fs.vol.FS.Rename(oldParent.inode.ei, oldName, newParent.inode.ei, newName, opts.Flags); err != nil {
		vfsObj.AbortRenameDentry(&handle, &renamed.vfsd, replacedVFSD)
		return toErr(err)
	}
	delete(oldParent.children, oldName)
	if exchange {
		delete(newParent.children, newName)
		newParent.insertChildLocked(renamed, newName)
		oldParent.insertChildLocked(replaced, oldName)
		vfsObj.CommitRenameExchangeDentry(&handle, &renamed.vfsd, replacedVFSD)
	} else {
		if replaced != nil {
			replaced.IncRef()
			toDecRef = append(toDecRef, replaced)
			replaced.unlinkLocked()
		}
		newParent.insertChildLocked(renamed, newName)
		toDecRef = append(toDecRef, vfsObj.CommitRenameReplaceDentry(ctx, &handle, &renamed.vfsd, replacedVFSD)...)
	}
	vfs.InotifyRename(ctx, &renamed.inode.watches, &oldParent.inode.watches, &newParent.inode.watches, oldName, newName, renamed.inode.isDir())
	if exchange {
		vfs.InotifyRename(ctx, &replaced.inode.watches, &newParent.inode.watches, &oldParent.inode.watches, newName, oldName, replaced.inode.isDir())
	}
	return nil
}

// mayRename checks that creds may take renamed from its place, and replaced too where there is one, and that their types agree.
// Whether a directory that is to be replaced is empty is ext4's to see.
func (fs *filesystem) mayRename(creds *auth.Credentials, oldParent, newParent, renamed, replaced *dentry, exchange bool) error {
	if err := oldParent.inode.mayDelete(creds, renamed.inode); err != nil {
		return err
	}
	moving := []*dentry{renamed}
	if replaced == nil {
		if err := newParent.inode.checkPermissions(creds, vfs.MayWrite|vfs.MayExec); err != nil {
			return err
		}
	} else {
		if err := newParent.inode.mayDelete(creds, replaced.inode); err != nil {
			return err
		}
		switch {
		case exchange:
			moving = append(moving, replaced)
		case renamed.inode.isDir() && !replaced.inode.isDir():
			return linuxerr.ENOTDIR
		case !renamed.inode.isDir() && replaced.inode.isDir():
			return linuxerr.EISDIR
		}
	}
	if oldParent == newParent {
		return nil
	}
	for _, d := range moving {
		if !d.inode.isDir() {
			continue
		}
		// Its ".." changes.
		if err := d.inode.checkPermissions(creds, vfs.MayWrite); err != nil {
			return err
		}
	}
	return nil
}

// SetStatAt implements vfs.FilesystemImpl.SetStatAt.
func (fs *filesystem) SetStatAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.SetStatOptions) error {
	return fs.modify(ctx, rp, func(d *dentry) error {
		if err := d.inode.setStat(ctx, rp.Credentials(), &opts); err != nil {
			return err
		}
		if ev := vfs.InotifyEventFromStatMask(opts.Stat.Mask); ev != 0 {
			d.InotifyWithParent(ctx, ev, 0, vfs.InodeEvent)
		}
		return nil
	})
}

// StatAt implements vfs.FilesystemImpl.StatAt.
func (fs *filesystem) StatAt(ctx context.Context, rp *vfs.ResolvingPath, _ vfs.StatOptions) (linux.Statx, error) {
	var stat linux.Statx
	if rp.Done() && !rp.ShouldFollowSymlink() {
		// May be called with mm locks held, so without ours.
		rp.Start().Impl().(*dentry).inode.statTo(&stat)
		return stat, nil
	}
	err := fs.with(ctx, rp, func(d *dentry) error {
		d.inode.statTo(&stat)
		return nil
	})
	return stat, err
}

// StatFSAt implements vfs.FilesystemImpl.StatFSAt.
func (fs *filesystem) StatFSAt(ctx context.Context, rp *vfs.ResolvingPath) (linux.Statfs, error) {
	if err := fs.with(ctx, rp, func(*dentry) error { return nil }); err != nil {
		return linux.Statfs{}, err
	}
	return fs.statFS(), nil
}

// BoundEndpointAt implements vfs.FilesystemImpl.BoundEndpointAt.
func (fs *filesystem) BoundEndpointAt(ctx context.Context, rp *vfs.ResolvingPath, _ vfs.BoundEndpointOptions) (transport.BoundEndpoint, error) {
	var ep transport.BoundEndpoint
	err := fs.with(ctx, rp, func(d *dentry) error {
		if err := d.inode.checkPermissions(rp.Credentials(), vfs.MayWrite); err != nil {
			return err
		}
		if d.inode.ep == nil {
			return linuxerr.ECONNREFUSED // no socket, or one whose owner is gone
		}
		ep = d.inode.ep
		return nil
	})
	return ep, err
}

// ListXattrAt implements vfs.FilesystemImpl.ListXattrAt.
func (fs *filesystem) ListXattrAt(ctx context.Context, rp *vfs.ResolvingPath, size uint64) ([]string, error) {
	var names []string
	err := fs.with(ctx, rp, func(d *dentry) (err error) {
		names, err = d.inode.listXattr(rp.Credentials(), size)
		return err
	})
	return names, err
}

// GetXattrAt implements vfs.FilesystemImpl.GetXattrAt.
func (fs *filesystem) GetXattrAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.GetXattrOptions) (string, error) {
	var value string
	err := fs.with(ctx, rp, func(d *dentry) (err error) {
		value, err = d.inode.getXattr(rp.Credentials(), &opts)
		return err
	})
	return value, err
}

// SetXattrAt implements vfs.FilesystemImpl.SetXattrAt.
func (fs *filesystem) SetXattrAt(ctx context.Context, rp *vfs.ResolvingPath, opts vfs.SetXattrOptions) error {
	return fs.modify(ctx, rp, func(d *dentry) error {
		if err := d.inode.setXattr(rp.Credentials(), &opts); err != nil {
			return err
		}
		d.InotifyWithParent(ctx, linux.IN_ATTRIB, 0, vfs.InodeEvent)
		return nil
	})
}

// RemoveXattrAt implements vfs.FilesystemImpl.RemoveXattrAt.
func (fs *filesystem) RemoveXattrAt(ctx context.Context, rp *vfs.ResolvingPath, name string) error {
	return fs.modify(ctx, rp, func(d *dentry) error {
		if err := d.inode.removeXattr(rp.Credentials(), name); err != nil {
			return err
		}
		d.InotifyWithParent(ctx, linux.IN_ATTRIB, 0, vfs.InodeEvent)
		return nil
	})
}

// GetPosixACLAt implements vfs.FilesystemImpl.GetPosixACLAt.
func (fs *filesystem) GetPosixACLAt(ctx context.Context, rp *vfs.ResolvingPath, t vfs.ACLType) (*vfs.PosixACL, error) {
	var list *vfs.PosixACL
	err := fs.with(ctx, rp, func(d *dentry) (err error) {
		list, err = d.inode.posixACL(t)
		return err
	})
	return list, err
}

// SetPosixACLAt implements vfs.FilesystemImpl.SetPosixACLAt.
func (fs *filesystem) SetPosixACLAt(ctx context.Context, rp *vfs.ResolvingPath, t vfs.ACLType, acl *vfs.PosixACL, clearSGID bool) (*vfs.PosixACL, linux.FileMode, error) {
	var mode linux.FileMode
	err := fs.modify(ctx, rp, func(d *dentry) (err error) {
		d.inode.mu.Lock()
		defer d.inode.mu.Unlock()
		acl, mode, err = d.inode.setPosixACLLocked(rp.Credentials(), t, acl, clearSGID)
		return err
	})
	return acl, mode, err
}
