package sentryfs

import (
	"slices"
	"strings"
	"syscall"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/vfs"

	"gvx.dev/gvx/native/internal/ext4"
)

// checkXattr checks that name is in a namespace ext4 stores, and that creds may access it so. Sources: xattr(7) and Linux's
// fs/xattr.c:xattr_permission(); security.* other than capabilities follows cap_inode_setxattr().
func (i *inode) checkXattr(creds *auth.Credentials, ats vfs.AccessTypes, name string) error {
	a := i.ei.Attr()
	if ats.MayWrite() && a.Flags&(ext4.FlagImmutable|ext4.FlagAppend) != 0 {
		return linuxerr.EPERM
	}
	mode, kuid, kgid := linux.FileMode(a.Mode), auth.KUID(a.UID), auth.KGID(a.GID)
	switch {
	case strings.HasPrefix(name, linux.XATTR_SECURITY_PREFIX):
		if ats.MayWrite() {
			need := linux.Capability(linux.CAP_SYS_ADMIN)
			if name == linux.XATTR_SECURITY_CAPABILITY {
				need = linux.CAP_SETFCAP
			}
			if !creds.HasCapabilityOnFile(need, kuid, kgid) {
				return linuxerr.EPERM
			}
		}
		return nil
	case strings.HasPrefix(name, linux.XATTR_TRUSTED_PREFIX):
		return vfs.CheckXattrPermissions(creds, ats, mode, kuid, name)
	case strings.HasPrefix(name, linux.XATTR_USER_PREFIX):
		if err := vfs.CheckXattrPermissions(creds, ats, mode, kuid, name); err != nil {
			return err
		}
		return vfs.GenericCheckPermissions(creds, ats, mode, i.acl().access, kuid, kgid)
	}
	return linuxerr.EOPNOTSUPP
}

func (i *inode) listXattr(creds *auth.Credentials, size uint64) ([]string, error) {
	names, err := i.ei.ListXattr()
	if err != nil {
		return nil, toErr(err)
	}
	admin := creds.HasRootCapability(linux.CAP_SYS_ADMIN)
	names = slices.DeleteFunc(names, func(n string) bool {
		return !admin && strings.HasPrefix(n, linux.XATTR_TRUSTED_PREFIX)
	})
	total := uint64(0)
	for _, n := range names {
		total += uint64(len(n)) + 1
	}
	if size != 0 && total > size {
		return nil, linuxerr.ERANGE
	}
	return names, nil
}

func (i *inode) getXattr(creds *auth.Credentials, opts *vfs.GetXattrOptions) (string, error) {
	if strings.HasPrefix(opts.Name, linux.XATTR_SYSTEM_PREFIX) {
		l := i.acl()
		return vfs.ACLGetXattr(creds, opts, linux.FileMode(i.ei.Attr().Mode), l.access, l.def)
	}
	if err := i.checkXattr(creds, vfs.MayRead, opts.Name); err != nil {
		return "", err
	}
	if opts.Name == linux.XATTR_SECURITY_CAPABILITY && i.noCaps.Load() {
		return "", linuxerr.ENODATA
	}
	value, err := i.ei.GetXattr(opts.Name)
	if err != nil {
		return "", toErr(err)
	}
	if opts.Name == linux.XATTR_SECURITY_CAPABILITY {
		return auth.FixupVfsCapDataOnGet(creds, string(value))
	}
	return string(value), nil
}

func (i *inode) setXattr(creds *auth.Credentials, opts *vfs.SetXattrOptions) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	a := i.ei.Attr()
	if strings.HasPrefix(opts.Name, linux.XATTR_SYSTEM_PREFIX) {
		if a.Flags&(ext4.FlagImmutable|ext4.FlagAppend) != 0 {
			return linuxerr.EPERM
		}
		list, t, err := vfs.ACLSetXattr(creds, opts, linux.FileMode(a.Mode), auth.KUID(a.UID))
		if err != nil {
			return err
		}
		_, _, err = i.setPosixACLLocked(creds, t, list, true)
		return err
	}
	if err := i.checkXattr(creds, vfs.MayWrite, opts.Name); err != nil {
		return err
	}
	value := opts.Value
	if opts.Name == linux.XATTR_SECURITY_CAPABILITY {
		var err error
		if value, err = auth.FixupVfsCapDataOnSet(creds, value, auth.KUID(a.UID), auth.KGID(a.GID)); err != nil {
			return err
		}
	}
	// Linux's flags have the values of ext4's.
	if err := i.ei.SetXattr(opts.Name, []byte(value), int(opts.Flags)); err != nil {
		return toErr(err)
	}
	if opts.Name == linux.XATTR_SECURITY_CAPABILITY {
		i.noCaps.Store(false)
	}
	return nil
}

func (i *inode) removeXattr(creds *auth.Credentials, name string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	a := i.ei.Attr()
	if strings.HasPrefix(name, linux.XATTR_SYSTEM_PREFIX) {
		if a.Flags&(ext4.FlagImmutable|ext4.FlagAppend) != 0 {
			return linuxerr.EPERM
		}
		t, err := vfs.ACLRemoveXattr(creds, name, linux.FileMode(a.Mode), auth.KUID(a.UID))
		if err != nil {
			return err
		}
		_, _, err = i.setPosixACLLocked(creds, t, nil, true)
		return err
	}
	if err := i.checkXattr(creds, vfs.MayWrite, name); err != nil {
		return err
	}
	return toErr(i.ei.RemoveXattr(name))
}

// acl returns the access control lists, reading them the first time. A list that cannot be read grants nothing beyond
// the mode bits.
func (i *inode) acl() *acls {
	if l := i.acls.Load(); l != nil {
		return l
	}
	l := &acls{}
	if !i.isSymlink() {
		l.access = i.readACL(linux.XATTR_NAME_POSIX_ACL_ACCESS)
		if i.isDir() {
			l.def = i.readACL(linux.XATTR_NAME_POSIX_ACL_DEFAULT)
		}
	}
	if !i.acls.CompareAndSwap(nil, l) {
		return i.acls.Load()
	}
	return l
}

func (i *inode) readACL(name string) *vfs.PosixACL {
	b, err := i.ei.GetXattr(name)
	if err == nil {
		var list *vfs.PosixACL
		if list, err = vfs.ParsePosixACL(b, i.fs.rootNS); err == nil {
			return list
		}
	} else if isErrno(err, syscall.ENODATA) {
		return nil
	}
	log.Warningf("ext4: %s of inode %d: %v", name, i.ino, err)
	return nil
}

// storeACL writes a list (nil: none) to the volume and the cache. i.mu is held.
func (i *inode) storeACL(t vfs.ACLType, list *vfs.PosixACL) error {
	l := *i.acl()
	name, slot := linux.XATTR_NAME_POSIX_ACL_ACCESS, &l.access
	if t == vfs.DefaultACL {
		name, slot = linux.XATTR_NAME_POSIX_ACL_DEFAULT, &l.def
	}
	if list != nil {
		if err := i.ei.SetXattr(name, list.Serialize(i.fs.rootNS), 0); err != nil {
			return toErr(err)
		}
	} else if *slot != nil {
		if err := i.ei.RemoveXattr(name); err != nil && !isErrno(err, syscall.ENODATA) {
			return toErr(err)
		}
	}
	*slot = list
	i.acls.Store(&l)
	return nil
}

// posixACL implements GetPosixACL and GetPosixACLAt.
func (i *inode) posixACL(t vfs.ACLType) (*vfs.PosixACL, error) {
	switch t {
	case vfs.AccessACL:
		return i.acl().access, nil
	case vfs.DefaultACL:
		return i.acl().def, nil
	}
	return nil, linuxerr.EINVAL
}

// setPosixACLLocked implements SetPosixACL and SetPosixACLAt: it stores list, and for an access list sets the mode bits it is
// equivalent to. It returns the list that remains (none where mode bits say it all) and the mode. i.mu is held.
func (i *inode) setPosixACLLocked(creds *auth.Credentials, t vfs.ACLType, list *vfs.PosixACL, clearSGID bool) (*vfs.PosixACL, linux.FileMode, error) {
	a := i.ei.Attr()
	switch t {
	case vfs.DefaultACL:
		if !i.isDir() {
			return nil, linux.FileMode(a.Mode), nil
		}
		if err := i.storeACL(t, list); err != nil {
			return nil, 0, err
		}
		return list, linux.FileMode(a.Mode), toErr(i.ei.Touch(ext4.SetCtime))
	case vfs.AccessACL:
		perm, equiv := a.Mode&linux.PermissionsMask, true
		if list != nil {
			perm, equiv = list.Mode()
			perm &= linux.PermissionsMask
		}
		mode := a.Mode&^linux.PermissionsMask | perm
		if clearSGID && vfs.ShouldClearSGID(creds, linux.FileMode(mode), auth.KUID(a.UID), auth.KGID(a.GID)) {
			mode &^= linux.S_ISGID
		}
		if equiv {
			list = nil
		}
		if err := i.storeACL(t, list); err != nil {
			return nil, 0, err
		}
		return list, linux.FileMode(mode), toErr(i.ei.SetAttr(ext4.SetAttr{Mask: ext4.SetMode, Mode: mode &^ linux.S_IFMT}))
	}
	return nil, 0, linuxerr.EOPNOTSUPP
}
