package sentryfs

import (
	"bytes"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/tmpfs"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"
)

func TestNamespace(t *testing.T) {
	e := newEnv(t)
	e.ok(e.mkdir("/a", 0o755))
	e.ok(e.mkdir("/a/b", 0o700))
	e.want(e.mkdir("/a/b", 0o700), unix.EEXIST, "mkdir of what is there")
	e.want(e.mkdir("/x/y", 0o700), unix.ENOENT, "mkdir below nothing")
	e.put("/a/f", []byte("hello"))
	e.want(e.mkdir("/a/f/g", 0o700), unix.ENOTDIR, "mkdir below a file")
	e.ok(e.link("/a/f", "/a/g"))
	if st := e.stat("/a/g"); st.Nlink != 2 || st.Ino != e.stat("/a/f").Ino {
		t.Errorf("a second name: %+v", st)
	}
	e.want(e.link("/a/b", "/a/h"), unix.EPERM, "link of a directory")
	mnt, err := e.vfs.MountAt(e.ctx, e.creds, "tmpfs", e.at("/a/b"), tmpfs.Name, &vfs.MountOptions{GetFilesystemOptions: vfs.GetFilesystemOptions{InternalMount: true}})
	e.ok(err)
	e.want(e.link("/a/b", "/a/h"), unix.EXDEV, "link of another file system's root")
	e.want(e.rmdir("/a/b"), unix.EBUSY, "rmdir of a mount point")
	e.want(e.rename("/a/b", "/a/h", 0), unix.EBUSY, "rename of a mount point")
	e.ok(e.mkdir("/a/b/in tmpfs", 0o755))
	mnt.IncRef()
	e.ok(e.vfs.UmountAt(e.ctx, e.creds, e.at("/a/b"), &vfs.UmountOptions{Flags: linux.MNT_DETACH}))
	mnt.DecRef(e.ctx)
	e.ok(e.symlink("../a/f", "/a/s"))
	e.same("/a/s", []byte("hello"))
	if target, err := e.vfs.ReadlinkAt(e.ctx, e.creds, e.at("/a/s")); err != nil || target != "../a/f" {
		t.Errorf("readlink: %q, %v", target, err)
	}
	_, err = e.vfs.OpenAt(e.ctx, e.creds, e.at("/a/s"), &vfs.OpenOptions{Flags: linux.O_NOFOLLOW})
	e.want(err, unix.ELOOP, "open of a symlink with O_NOFOLLOW")
	e.ok(e.mknod("/a/null", linux.S_IFCHR|0o666, 1, 3))
	if st := e.stat("/a/null"); st.RdevMajor != 1 || st.RdevMinor != 3 || st.Mode != linux.S_IFCHR|0o666 {
		t.Errorf("device: %+v", st)
	}
	e.ok(e.mknod("/a/wh", linux.S_IFCHR, 0, 0))
	e.ok(e.mknod("/a/fifo", linux.S_IFIFO|0o600, 0, 0))
	e.ok(e.mknod("/a/sock", linux.S_IFSOCK|0o600, 0, 0))

	types := map[string]uint8{".": linux.DT_DIR, "..": linux.DT_DIR, "b": linux.DT_DIR, "f": linux.DT_REG, "g": linux.DT_REG, "s": linux.DT_LNK, "null": linux.DT_CHR, "wh": linux.DT_CHR, "fifo": linux.DT_FIFO, "sock": linux.DT_SOCK}
	list := e.ls("/a")
	for name, typ := range types {
		d, ok := list[name]
		if !ok || d.Type != typ {
			t.Errorf("listing has %q as %+v", name, d)
		}
		if name != ".." && d.Ino != e.stat("/a/"+name).Ino {
			t.Errorf("%q has inode %d in the listing and %d in stat", name, d.Ino, e.stat("/a/"+name).Ino)
		}
	}
	if len(list) != len(types) {
		t.Errorf("%d entries, want %d", len(list), len(types))
	}

	e.want(e.rmdir("/a"), unix.ENOTEMPTY, "rmdir of a directory with entries")
	e.want(e.rmdir("/a/f"), unix.ENOTDIR, "rmdir of a file")
	e.want(e.unlink("/a/b"), unix.EISDIR, "unlink of a directory")
	e.want(e.unlink("/a/nothing"), unix.ENOENT, "unlink of nothing")
	e.ok(e.rmdir("/a/b"))
	e.missing("/a/b")
	e.ok(e.unlink("/a/f"))
	e.same("/a/g", []byte("hello"))
	long := string(bytes.Repeat([]byte("n"), 255))
	e.put("/"+long, nil)
	e.ok(e.unlink("/" + long))
	_, err = e.open("/"+long+"n", linux.O_CREAT, 0o600)
	e.want(err, unix.ENAMETOOLONG, "a name of 256 bytes")
	if st := e.stat("/a"); st.Mask&linux.STATX_BTIME == 0 || st.Btime.Sec == 0 || st.Nlink != 2 {
		t.Errorf("directory: %+v", st)
	}
	fsst, err := e.vfs.StatFSAt(e.ctx, e.creds, e.at("/a"))
	e.ok(err)
	if fsst.Type != linux.EXT_SUPER_MAGIC || fsst.BlockSize != 4096 || fsst.Blocks == 0 || fsst.BlocksFree > fsst.Blocks || fsst.NameLength != 255 {
		t.Errorf("statfs: %+v", fsst)
	}
}

func TestRename(t *testing.T) {
	e := newEnv(t)
	for _, d := range []string{"/a", "/b", "/a/d", "/a/d/e", "/b/full", "/b/full/x", "/b/empty"} {
		e.ok(e.mkdir(d, 0o755))
	}
	e.put("/a/f", []byte("f"))
	e.put("/b/g", []byte("g"))
	e.want(e.rename("/a/f", "/b/g", linux.RENAME_NOREPLACE), unix.EEXIST, "rename onto a file with NOREPLACE")
	e.want(e.rename("/a/f", "/b/full", 0), unix.EISDIR, "file onto a directory")
	e.want(e.rename("/a/d", "/b/g", 0), unix.ENOTDIR, "directory onto a file")
	e.want(e.rename("/a/d", "/b/full", 0), unix.ENOTEMPTY, "directory onto a full one")
	e.want(e.rename("/a/d", "/a/d/e/x", 0), unix.EINVAL, "directory below itself")
	e.want(e.rename("/a/d", "/a/d/e/x", linux.RENAME_EXCHANGE), unix.ENOENT, "exchange with nothing below itself")
	e.want(e.rename("/a/d", "/a/d/e", linux.RENAME_NOREPLACE), unix.EEXIST, "onto what is there, below itself")
	e.want(e.rename("/a/d/e", "/a", 0), unix.ENOTEMPTY, "directory onto its ancestor")
	e.want(e.rename("/a/d/e", "/a", linux.RENAME_EXCHANGE), unix.EINVAL, "exchange with an ancestor")
	e.ok(e.rename("/a", "/a", 0))
	e.want(e.rename("/a/f", "/b/none", linux.RENAME_EXCHANGE), unix.ENOENT, "exchange with nothing")
	e.ok(e.rename("/a/f", "/b/g", 0))
	e.missing("/a/f")
	e.same("/b/g", []byte("f"))
	e.ok(e.rename("/a/d", "/b/empty", 0))
	if got := e.ls("/b/empty"); got[".."].Ino != e.stat("/b").Ino || len(got) != 3 {
		t.Errorf("moved directory: %v", got)
	}
	if st := e.stat("/a"); st.Nlink != 2 {
		t.Errorf("/a has %d links after its directory left", st.Nlink)
	}
	e.ok(e.rename("/b/g", "/b/full", linux.RENAME_EXCHANGE))
	e.same("/b/full", []byte("f"))
	e.ls("/b/g/x")
	e.ok(e.rename("/b/full", "/a/moved", linux.RENAME_WHITEOUT))
	if st := e.stat("/b/full"); st.Mode&linux.S_IFMT != linux.S_IFCHR || st.RdevMajor != 0 || st.RdevMinor != 0 {
		t.Errorf("whiteout: %+v", st)
	}
	e.same("/a/moved", []byte("f"))
	// Two names of one file stay.
	e.ok(e.link("/a/moved", "/a/other"))
	e.ok(e.rename("/a/moved", "/a/other", 0))
	e.same("/a/moved", []byte("f"))
	// An open file follows its name; its old place is free.
	fd := e.mustOpen("/a/moved", linux.O_RDWR, 0)
	defer fd.DecRef(e.ctx)
	e.ok(e.rename("/a/moved", "/b/again", 0))
	if p, err := e.vfs.PathnameWithDeleted(e.ctx, e.root, fd.VirtualDentry()); err != nil || p != "/b/again" {
		t.Errorf("path of an open file: %q, %v", p, err)
	}
}

// A removed file lives while it is open, and its space comes back afterwards.
func TestUnlinkedOpenFile(t *testing.T) {
	e := newEnv(t)
	before, err := e.vfs.StatFSAt(e.ctx, e.creds, e.at("/"))
	e.ok(err)
	e.ok(e.mkdir("/d", 0o755))
	data := pattern(3<<20, 1)
	e.put("/d/f", data)
	fd := e.mustOpen("/d/f", linux.O_RDWR, 0)
	dir := e.mustOpen("/d", linux.O_RDONLY|linux.O_DIRECTORY, 0)
	e.ok(e.unlink("/d/f"))
	e.ok(e.rmdir("/d"))
	if got := e.pread(fd, len(data), 0); !bytes.Equal(got, data) {
		t.Error("an open file lost its data with its name")
	}
	st, err := fd.Stat(e.ctx, vfs.StatOptions{})
	if err != nil || st.Nlink != 0 {
		t.Errorf("links of a removed file: %d, %v", st.Nlink, err)
	}
	var d dirents
	e.ok(dir.IterDirents(e.ctx, &d))
	rel := &vfs.PathOperation{Root: e.root, Start: dir.VirtualDentry(), Path: e.at("x").Path}
	e.want(e.vfs.MkdirAt(e.ctx, e.creds, rel, &vfs.MkdirOptions{Mode: 0o700}), unix.ENOENT, "mkdir in a removed directory")
	up := &vfs.PathOperation{Root: e.root, Start: dir.VirtualDentry(), Path: e.at("..").Path}
	if st, err := e.vfs.StatAt(e.ctx, e.creds, up, &vfs.StatOptions{}); err != nil || st.Ino != 2 {
		t.Errorf("parent of a removed directory: %d, %v", st.Ino, err)
	}
	if p, err := e.vfs.PathnameWithDeleted(e.ctx, e.root, fd.VirtualDentry()); err != nil || p != "/d/f (deleted)" {
		t.Errorf("path of a removed file: %q, %v", p, err)
	}
	fd.DecRef(e.ctx)
	dir.DecRef(e.ctx)
	after, err := e.vfs.StatFSAt(e.ctx, e.creds, e.at("/"))
	e.ok(err)
	if after.BlocksFree != before.BlocksFree || after.FilesFree != before.FilesFree {
		t.Errorf("free blocks %d, files %d; before there were %d and %d", after.BlocksFree, after.FilesFree, before.BlocksFree, before.FilesFree)
	}
	if n := len(e.root.Mount().Filesystem().Impl().(*filesystem).inodes); n != 1 {
		t.Errorf("%d inodes are kept, the root's should be", n)
	}
}

func TestTmpfile(t *testing.T) {
	e := newEnv(t)
	e.ok(e.mkdir("/d", 0o755))
	fd := e.mustOpen("/d", linux.O_TMPFILE|linux.O_DIRECTORY|linux.O_RDWR, 0o640)
	e.pwrite(fd, []byte("nameless"), 0)
	from := &vfs.PathOperation{Root: e.root, Start: fd.VirtualDentry()}
	e.ok(e.vfs.LinkAt(e.ctx, e.creds, from, e.at("/d/named")))
	fd.DecRef(e.ctx)
	e.same("/d/named", []byte("nameless"))
	if st := e.stat("/d/named"); st.Nlink != 1 || st.Mode != linux.S_IFREG|0o640 {
		t.Errorf("named file: %+v", st)
	}
	fd = e.mustOpen("/d", linux.O_TMPFILE|linux.O_EXCL|linux.O_DIRECTORY|linux.O_RDWR, 0o640)
	from = &vfs.PathOperation{Root: e.root, Start: fd.VirtualDentry()}
	e.want(e.vfs.LinkAt(e.ctx, e.creds, from, e.at("/d/never")), unix.ENOENT, "link of an O_EXCL temporary file")
	fd.DecRef(e.ctx)
}

func TestOpenFlags(t *testing.T) {
	e := newEnv(t)
	e.put("/f", []byte("0123456789"))
	_, err := e.open("/f", linux.O_CREAT|linux.O_EXCL|linux.O_WRONLY, 0o600)
	e.want(err, unix.EEXIST, "O_EXCL on what is there")
	_, err = e.open("/f", linux.O_DIRECTORY, 0)
	e.want(err, unix.ENOTDIR, "O_DIRECTORY on a file")
	_, err = e.open("/", linux.O_WRONLY, 0)
	e.want(err, unix.EISDIR, "a directory for writing")
	fd := e.mustOpen("/f", linux.O_WRONLY|linux.O_APPEND, 0)
	e.pwrite(fd, []byte("ab"), 0)
	fd.DecRef(e.ctx)
	e.same("/f", []byte("0123456789ab"))
	e.ok(e.symlink("g", "/s"))
	e.put("/s", []byte("through a dangling link"))
	e.same("/g", []byte("through a dangling link"))
	fd = e.mustOpen("/f", linux.O_RDWR|linux.O_TRUNC, 0)
	if st := e.stat("/f"); st.Size != 0 {
		t.Errorf("size %d after O_TRUNC", st.Size)
	}
	fd.DecRef(e.ctx)
}

func TestPermissions(t *testing.T) {
	e := newEnv(t)
	u := e.as(1000, 1000)
	v := e.as(1001, 1001)
	e.ok(e.mkdir("/tmp", 0o777))
	e.ok(e.setstat("/tmp", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o1777}, false))
	u.put("/tmp/mine", []byte("x"))
	if st := e.stat("/tmp/mine"); st.UID != 1000 || st.GID != 1000 {
		t.Errorf("owner: %+v", st)
	}
	e.want(v.unlink("/tmp/mine"), unix.EPERM, "removing another's file from a sticky directory")
	e.want(v.rename("/tmp/mine", "/tmp/stolen", 0), unix.EPERM, "renaming another's file in a sticky directory")
	e.want(u.mkdir("/no", 0o700), unix.EACCES, "mkdir in root's directory")
	e.ok(u.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o600}, false))
	_, err := v.open("/tmp/mine", linux.O_RDONLY, 0)
	e.want(err, unix.EACCES, "reading another's private file")
	e.want(v.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o666}, false), unix.EPERM, "chmod of another's file")
	e.want(u.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_UID, UID: 1001}, true), unix.EPERM, "chown without privilege")

	// Writing takes set-user-ID away unless root does it, chown always.
	for _, c := range []struct {
		who  *env
		mode uint16
	}{{e, linux.S_IFREG | 0o6755}, {u, linux.S_IFREG | 0o755}} {
		e.ok(e.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o6755}, false))
		fd := c.who.mustOpen("/tmp/mine", linux.O_WRONLY, 0)
		c.who.pwrite(fd, []byte("y"), 0)
		fd.DecRef(e.ctx)
		if st := e.stat("/tmp/mine"); st.Mode != c.mode {
			t.Errorf("mode after a write: %o, want %o", st.Mode, c.mode)
		}
		e.ok(e.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o6755}, false))
		c.who.truncate("/tmp/mine", 1)
		if st := e.stat("/tmp/mine"); st.Mode != c.mode {
			t.Errorf("mode after a truncation: %o, want %o", st.Mode, c.mode)
		}
	}
	e.ok(e.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_MODE, Mode: 0o4755}, false))
	e.ok(e.setstat("/tmp/mine", linux.Statx{Mask: linux.STATX_UID | linux.STATX_GID, UID: 7, GID: 8}, true))
	if st := e.stat("/tmp/mine"); st.Mode != linux.S_IFREG|0o755 || st.UID != 7 || st.GID != 8 {
		t.Errorf("after chown: %o %d:%d", st.Mode, st.UID, st.GID)
	}
	// A set-group-ID directory hands its group on.
	e.ok(e.mkdir("/shared", 0o777))
	e.ok(e.setstat("/shared", linux.Statx{Mask: linux.STATX_MODE | linux.STATX_GID, Mode: 0o2777, GID: 50}, false))
	u.put("/shared/f", nil)
	e.ok(u.mkdir("/shared/d", 0o755))
	if st := e.stat("/shared/f"); st.GID != 50 || st.Mode&linux.S_ISGID != 0 {
		t.Errorf("file in a set-group-ID directory: %d %o", st.GID, st.Mode)
	}
	if st := e.stat("/shared/d"); st.GID != 50 || st.Mode&linux.S_ISGID == 0 {
		t.Errorf("directory in a set-group-ID directory: %d %o", st.GID, st.Mode)
	}
}

func TestXattrs(t *testing.T) {
	e := newEnv(t)
	e.put("/f", []byte("x"))
	e.ok(e.mkdir("/d", 0o755))
	e.ok(e.mknod("/dev", linux.S_IFCHR|0o600, 1, 3))
	big := string(bytes.Repeat([]byte("v"), 3000))
	for name, value := range map[string]string{"user.a": "1", "trusted.overlay.opaque": "y", "user.big": big} {
		e.ok(e.setxattr("/f", name, value))
		if got, err := e.getxattr("/f", name); err != nil || got != value {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	e.ok(e.setxattr("/dev", "trusted.overlay.opaque", "y"))
	e.want(e.setxattr("/dev", "user.a", "1"), unix.EPERM, "user attribute of a device")
	e.want(e.setxattr("/f", "strange.a", "1"), unix.EOPNOTSUPP, "unknown namespace")
	_, err := e.getxattr("/f", "user.none")
	e.want(err, unix.ENODATA, "attribute that is not there")
	e.want(e.vfs.SetXattrAt(e.ctx, e.creds, e.at("/f"), &vfs.SetXattrOptions{Name: "user.a", Value: "2", Flags: linux.XATTR_CREATE}), unix.EEXIST, "XATTR_CREATE")
	e.want(e.vfs.SetXattrAt(e.ctx, e.creds, e.at("/f"), &vfs.SetXattrOptions{Name: "user.n", Value: "2", Flags: linux.XATTR_REPLACE}), unix.ENODATA, "XATTR_REPLACE")
	u := e.as(1000, 1000)
	_, err = u.getxattr("/f", "trusted.overlay.opaque")
	e.want(err, unix.ENODATA, "trusted attribute for a user")
	e.want(u.setxattr("/f", "trusted.x", "1"), unix.EPERM, "setting a trusted attribute as a user")
	e.want(u.setxattr("/f", "user.x", "1"), unix.EACCES, "setting a user attribute on root's file")
	names, err := e.vfs.ListXattrAt(e.ctx, e.creds, e.at("/f"), 0)
	if err != nil || len(names) != 3 {
		t.Errorf("names: %q, %v", names, err)
	}
	names, err = u.vfs.ListXattrAt(u.ctx, u.creds, u.at("/f"), 0)
	if err != nil || len(names) != 2 {
		t.Errorf("names for a user: %q, %v", names, err)
	}
	// File capabilities go with a write.
	caps := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	e.ok(e.setxattr("/f", "security.capability", caps))
	if got, err := e.getxattr("/f", "security.capability"); err != nil || got != caps {
		t.Errorf("capability: %q, %v", got, err)
	}
	fd := e.mustOpen("/f", linux.O_WRONLY, 0)
	e.pwrite(fd, []byte("y"), 0)
	fd.DecRef(e.ctx)
	_, err = e.getxattr("/f", "security.capability")
	e.want(err, unix.ENODATA, "capability after a write")
	e.ok(e.vfs.RemoveXattrAt(e.ctx, e.creds, e.at("/f"), "user.big"))
	_, err = e.getxattr("/f", "user.big")
	e.want(err, unix.ENODATA, "removed attribute")
}

// acl is an access control list as setxattr(2) takes it: owner rwx, the user of that id perm, group r-x, mask rwx, others none.
func acl(uid uint32, perm byte) string {
	entry := func(tag, perm byte, id uint32) string {
		return string([]byte{tag, 0, perm, 0, byte(id), byte(id >> 8), byte(id >> 16), byte(id >> 24)})
	}
	const none = ^uint32(0)
	return "\x02\x00\x00\x00" + entry(1, 7, none) + entry(2, perm, uid) + entry(4, 5, none) + entry(16, 7, none) + entry(32, 0, none)
}

func TestAccessControlLists(t *testing.T) {
	e := newEnv(t)
	u, v := e.as(1000, 1000), e.as(1001, 1001)
	e.ok(e.mkdir("/d", 0o755))
	e.put("/f", []byte("secret"))
	e.ok(e.setxattr("/f", "system.posix_acl_access", acl(1000, 4)))
	if st := e.stat("/f"); st.Mode != linux.S_IFREG|0o770 {
		t.Errorf("mode from the list: %o", st.Mode)
	}
	u.same("/f", []byte("secret"))
	_, err := v.open("/f", linux.O_RDONLY, 0)
	e.want(err, unix.EACCES, "a user the list does not name")
	e.ok(e.setxattr("/d", "system.posix_acl_default", acl(1000, 7)))
	e.put("/d/f", nil)
	e.ok(e.mkdir("/d/e", 0o777))
	if got, err := e.getxattr("/d/e", "system.posix_acl_default"); err != nil || got != acl(1000, 7) {
		t.Errorf("inherited default list: %q, %v", got, err)
	}
	if _, err := e.getxattr("/d/f", "system.posix_acl_access"); err != nil {
		t.Errorf("inherited list: %v", err)
	}
	e.ok(e.vfs.RemoveXattrAt(e.ctx, e.creds, e.at("/f"), "system.posix_acl_access"))
	_, err = u.open("/f", linux.O_RDONLY, 0)
	if err == nil {
		t.Error("the list is gone and still grants access")
	}
}

func TestReadWrite(t *testing.T) {
	e := newEnv(t)
	data := pattern(5<<20+123, 3)
	e.put("/f", data)
	e.same("/f", data)
	fd := e.mustOpen("/f", linux.O_RDWR, 0)
	defer fd.DecRef(e.ctx)
	for _, c := range []struct{ off, n int }{{1, 10}, {4095, 2}, {4096, 4096}, {1 << 20, 300000}, {len(data) - 3, 10}} {
		p := pattern(c.n, byte(c.off))
		e.pwrite(fd, p, int64(c.off))
		data = append(data, make([]byte, max(0, c.off+c.n-len(data)))...)
		copy(data[c.off:], p)
	}
	e.same("/f", data)
	// A hole reads as zeros, and SEEK_DATA and SEEK_HOLE see it.
	far := int64(20 << 20)
	e.pwrite(fd, []byte("end"), far)
	data = append(data, make([]byte, int(far)-len(data))...)
	data = append(data, "end"...)
	e.same("/f", data)
	if off, err := fd.Seek(e.ctx, 7<<20, linux.SEEK_DATA); err != nil || off != far {
		t.Errorf("SEEK_DATA: %d, %v", off, err)
	}
	if off, err := fd.Seek(e.ctx, 0, linux.SEEK_HOLE); err != nil || off < 5<<20 || off > 6<<20 {
		t.Errorf("SEEK_HOLE: %d, %v", off, err)
	}
	if st := e.stat("/f"); st.Blocks*512 > 6<<20 {
		t.Errorf("a file of 5 MiB and a hole takes %d bytes", st.Blocks*512)
	}
	e.truncate("/f", 5000)
	e.same("/f", data[:5000])
	e.truncate("/f", 9000)
	e.same("/f", append(data[:5000:5000], make([]byte, 4000)...))
	e.ok(fd.Allocate(e.ctx, 0, 0, 100000))
	if st := e.stat("/f"); st.Size != 100000 || st.Blocks*512 < 100000 {
		t.Errorf("after fallocate: size %d, %d bytes", st.Size, st.Blocks*512)
	}
	e.ok(fd.Allocate(e.ctx, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 8192))
	if got := e.pread(fd, 9000, 0); !bytes.Equal(got, make([]byte, 9000)) {
		t.Error("a punched hole does not read as zeros")
	}
	e.ok(fd.Sync(e.ctx))
}

func TestNoSpace(t *testing.T) {
	e := newEnv(t)
	fd := e.mustOpen("/f", linux.O_CREAT|linux.O_RDWR, 0o600)
	defer fd.DecRef(e.ctx)
	p := pattern(1<<20, 0)
	off := int64(0)
	for {
		n, err := fd.PWrite(e.ctx, usermem.BytesIOSequence(p), off, vfs.WriteOptions{})
		off += n
		if err != nil {
			e.want(err, unix.ENOSPC, "write to a full volume")
			break
		}
		if off > 80<<20 {
			t.Fatal("a volume of 64 MiB took 80 MiB")
		}
	}
	if off < 40<<20 {
		t.Errorf("full after %d bytes", off)
	}
	if got := e.pread(fd, 1<<20, off-1<<20); !bytes.Equal(got[:1000], append(p[off%(1<<20):], p...)[:1000]) {
		t.Error("the last data written does not read back")
	}
}

// space is a memmap.MappingSpace that notes what is invalidated.
type space struct{ invalidated []hostarch.AddrRange }

func (s *space) Invalidate(ar hostarch.AddrRange, _ memmap.InvalidateOpts) {
	s.invalidated = append(s.invalidated, ar)
}

// bytesOf reads what translations of a mapping show.
func (e *env) bytesOf(m memmap.Mappable, start, end uint64, at hostarch.AccessType) ([]byte, []memmap.Translation, error) {
	e.t.Helper()
	mr := memmap.MappableRange{Start: start, End: end}
	ts, err := m.Translate(e.ctx, mr, mr, at)
	if cerr := memmap.CheckTranslateResult(mr, mr, at, ts, err); cerr != nil {
		e.t.Fatalf("Translate(%v): %v", mr, cerr)
	}
	var out []byte
	for _, tr := range ts {
		tr.File.IncRef(tr.FileRange(), 0)
		bs, merr := tr.File.MapInternal(tr.FileRange(), hostarch.Read)
		if merr != nil {
			e.t.Fatal(merr)
		}
		for ; !bs.IsEmpty(); bs = bs.Tail() {
			out = append(out, bs.Head().ToSlice()...)
		}
		tr.File.DecRef(tr.FileRange())
	}
	return out, ts, err
}

// poke writes through a shared mapping.
func (e *env) poke(m memmap.Mappable, page uint64, at int, data string) {
	e.t.Helper()
	mr := memmap.MappableRange{Start: page, End: page + hostarch.PageSize}
	ts, err := m.Translate(e.ctx, mr, mr, hostarch.ReadWrite)
	if err != nil {
		e.t.Fatal(err)
	}
	fr := ts[0].FileRange()
	ts[0].File.IncRef(fr, 0)
	defer ts[0].File.DecRef(fr)
	bs, err := ts[0].File.MapInternal(fr, hostarch.ReadWrite)
	if err != nil {
		e.t.Fatal(err)
	}
	copy(bs.Head().ToSlice()[at:], data)
}

func TestMappings(t *testing.T) {
	e := newEnv(t)
	data := pattern(3<<20+100, 9)
	e.put("/f", data)
	fd := e.mustOpen("/f", linux.O_RDWR, 0)
	defer fd.DecRef(e.ctx)
	var opts memmap.MMapOpts
	e.ok(fd.ConfigureMMap(e.ctx, &opts))
	defer opts.MappingIdentity.DecRef(e.ctx)
	m := opts.Mappable
	ms := &space{}
	ar := hostarch.AddrRange{Start: 1 << 30, End: 1<<30 + 8<<20}
	e.ok(m.AddMapping(e.ctx, ms, ar, 0, true))
	defer m.RemoveMapping(e.ctx, ms, ar, 0, true)

	got, _, err := e.bytesOf(m, 0, 3<<20+4096, hostarch.Read)
	e.ok(err)
	if !bytes.Equal(got[:len(data)], data) || !bytes.Equal(got[len(data):], make([]byte, 4096-100)) {
		t.Error("the mapping does not show the file, with zeros after its end")
	}
	// Past the end is a bus error.
	_, ts, err := e.bytesOf(m, 3<<20, 3<<20+8192, hostarch.Read)
	if _, ok := err.(*memmap.BusError); !ok || len(ts) != 1 {
		t.Errorf("beyond the end: %v, %v", ts, err)
	}
	// Both ways of writing are seen by the other.
	e.pwrite(fd, []byte("by write"), 8192)
	got, _, err = e.bytesOf(m, 8192, 12288, hostarch.Read)
	e.ok(err)
	if string(got[:8]) != "by write" {
		t.Errorf("the mapping shows %q", got[:8])
	}
	e.poke(m, 8192, 0, "by mapping")
	if got := e.pread(fd, 10, 8192); string(got) != "by mapping" {
		t.Errorf("read shows %q", got)
	}
	// What a mapping left beyond the end does not come up when the file grows.
	e.poke(m, 3<<20, 200, "garbage")
	e.pwrite(fd, []byte("z"), 4<<20)
	if got := e.pread(fd, 4096, 3<<20); !bytes.Equal(got[100:], make([]byte, 3996)) {
		t.Error("bytes written beyond the end of file have become part of it")
	}
	// A page of the hole that this made gets a block, and a write shows there.
	hole := uint64(7<<20) / 2
	got, _, err = e.bytesOf(m, hole, hole+4096, hostarch.Read)
	e.ok(err)
	if !bytes.Equal(got, make([]byte, 4096)) {
		t.Error("a hole is not zeros")
	}
	e.pwrite(fd, []byte("filled"), int64(hole))
	got, _, err = e.bytesOf(m, hole, hole+4096, hostarch.Read)
	e.ok(err)
	if string(got[:6]) != "filled" {
		t.Error("a write into a hole that was mapped is not seen")
	}
	// Truncation takes the translations back before the blocks go.
	ms.invalidated = nil
	e.truncate("/f", 4097)
	if len(ms.invalidated) == 0 || ms.invalidated[0].Start != ar.Start+8192 {
		t.Errorf("invalidated: %v", ms.invalidated)
	}
	if _, _, err = e.bytesOf(m, 8192, 12288, hostarch.Read); err == nil {
		t.Error("a truncated page can still be translated")
	}
	// A mapped file keeps its blocks when a hole is punched.
	_, before, err := e.bytesOf(m, 0, 4096, hostarch.Read)
	e.ok(err)
	e.ok(fd.Allocate(e.ctx, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
	got, after, err := e.bytesOf(m, 0, 4096, hostarch.Read)
	e.ok(err)
	if !bytes.Equal(got, make([]byte, 4096)) || before[0].Offset != after[0].Offset {
		t.Errorf("punched while mapped: at %#x, was at %#x", after[0].Offset, before[0].Offset)
	}
}

func TestReadOnlyVolume(t *testing.T) {
	e := newEnv(t)
	e.put("/f", pattern(10000, 1))
	e.truncate("/f", 100000)
	e.close()
	t.Run("mounted", func(t *testing.T) {
		r := openEnv(t, e.image, true)
		want := append(pattern(10000, 1), make([]byte, 90000)...)
		r.same("/f", want)
		r.want(r.mkdir("/d", 0o700), unix.EROFS, "mkdir")
		r.want(r.unlink("/f"), unix.EROFS, "unlink")
		_, err := r.open("/f", linux.O_RDWR, 0)
		r.want(err, unix.EROFS, "open for writing")
		fd := r.mustOpen("/f", linux.O_RDONLY, 0)
		defer fd.DecRef(r.ctx)
		var opts memmap.MMapOpts
		r.ok(fd.ConfigureMMap(r.ctx, &opts))
		defer opts.MappingIdentity.DecRef(r.ctx)
		ms := &space{}
		ar := hostarch.AddrRange{Start: 1 << 30, End: 1<<30 + 1<<20}
		r.ok(opts.Mappable.AddMapping(r.ctx, ms, ar, 0, false))
		defer opts.Mappable.RemoveMapping(r.ctx, ms, ar, 0, false)
		got, _, err := r.bytesOf(opts.Mappable, 0, 98304, hostarch.Read)
		r.ok(err)
		if !bytes.Equal(got, want[:98304]) {
			t.Error("the mapping of a file with a hole differs from the file")
		}
	})
}

func TestManyEntries(t *testing.T) {
	e := newEnv(t)
	e.ok(e.mkdir("/d", 0o755))
	const n = 3000
	for i := range n {
		e.ok(e.mknod(fmt.Sprintf("/d/file number %d", i), linux.S_IFREG|0o644, 0, 0))
	}
	if got := len(e.ls("/d")); got != n+2 {
		t.Fatalf("%d entries, want %d", got, n+2)
	}
	// A listing in progress misses nothing that stays and shows nothing twice while others come and go.
	fd := e.mustOpen("/d", linux.O_RDONLY|linux.O_DIRECTORY, 0)
	defer fd.DecRef(e.ctx)
	seen := make(map[string]int)
	stop := &stopper{seen: seen, left: 100}
	for fd.IterDirents(e.ctx, stop) != nil {
		i := len(seen)
		e.ok(e.mknod(fmt.Sprintf("/d/new %d", i), linux.S_IFREG|0o644, 0, 0))
		if i%2 == 0 {
			e.ok(e.unlink(fmt.Sprintf("/d/new %d", i)))
		}
		stop.left = 100
	}
	for i := range n {
		if got := seen[fmt.Sprintf("file number %d", i)]; got != 1 {
			t.Fatalf("entry %d was listed %d times", i, got)
		}
	}
	// Dentries can be evicted and come back.
	fs := e.root.Mount().Filesystem().Impl().(*filesystem)
	fs.mu.Lock()
	fs.evictLocked(e.ctx, fs.root, 10)
	fs.mu.Unlock()
	if got := fs.dentries.Load(); got > 10 {
		t.Errorf("%d dentries are left", got)
	}
	e.stat("/d/file number 7")
}

// stopper is a callback that gives up after some entries, as getdents does when its buffer is full.
type stopper struct {
	seen map[string]int
	left int
}

func (s *stopper) Handle(d vfs.Dirent) error {
	if s.left == 0 {
		return linuxerr.EINVAL
	}
	s.left--
	s.seen[d.Name]++
	return nil
}

// After an unmount the same volume can be mounted again.
func TestMountAgain(t *testing.T) {
	e := newEnv(t)
	e.put("/f", []byte("first"))
	for i := range 2 {
		mnt, err := e.vfs.MountDisconnected(e.ctx, e.creds, "volume", Name, &vfs.MountOptions{
			GetFilesystemOptions: vfs.GetFilesystemOptions{InternalMount: true, InternalData: e.vol},
		})
		e.ok(err)
		root := vfs.MakeVirtualDentry(mnt, mnt.Root())
		root.Dentry().IncRef()
		at := &vfs.PathOperation{Root: root, Start: root, Path: e.at("f").Path}
		if st, err := e.vfs.StatAt(e.ctx, e.creds, at, &vfs.StatOptions{}); err != nil || st.Size != 5 {
			t.Errorf("mount %d: %+v, %v", i, st, err)
		}
		root.DecRef(e.ctx)
	}
}
