package ext4

import (
	"bytes"
	"errors"
	"strings"
	"syscall"
	"testing"
)

func TestXattrErrors(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", nil)
	for _, c := range []struct {
		name  string
		value int
		flags int
		want  error
	}{
		{"user.a", 10, XattrReplace, syscall.ENODATA},
		{"user.a", 10, XattrCreate, nil},
		{"user.a", 10, XattrCreate, syscall.EEXIST},
		{"user.a", 0, XattrReplace, nil},
		{"user.a", 65537, 0, syscall.E2BIG},
		{"user.a", 5000, 0, syscall.ENOSPC},
		{"user.big", 3900, 0, nil},
		{"user.more", 200, 0, syscall.ENOSPC},
		{"user." + strings.Repeat("n", 251), 1, 0, syscall.ERANGE},
		{"user.", 1, 0, syscall.EINVAL},
		{"bogus.x", 1, 0, syscall.EOPNOTSUPP},
		{"system.other", 1, 0, syscall.EOPNOTSUPP},
	} {
		if err := f.SetXattr(c.name, make([]byte, c.value), c.flags); !errors.Is(err, c.want) {
			t.Errorf("set %.20s (%d bytes, flags %d): %v, want %v", c.name, c.value, c.flags, err, c.want)
		}
	}
	if v, err := f.GetXattr("user.a"); err != nil || len(v) != 0 {
		t.Errorf("user.a: %d bytes, %v", len(v), err)
	}
	if err := f.RemoveXattr("user.none"); !errors.Is(err, syscall.ENODATA) {
		t.Errorf("remove: %v", err)
	}
	must(t, f.RemoveXattr("user.big"))
	if a := f.Attr(); a.Blocks512 != 0 {
		t.Errorf("%d sectors are left", a.Blocks512)
	}
	f.DecRef()
	finish(t, fs, img)
}

// TestACLs are stored in the format's own encoding, which the kernel shows as ours.
func TestACLs(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", nil)
	acl := []byte{2, 0, 0, 0}
	for _, e := range [][8]byte{
		{0x01, 0, 6, 0, 0xff, 0xff, 0xff, 0xff}, {0x02, 0, 4, 0, 0xe8, 3, 0, 0}, {0x04, 0, 4, 0, 0xff, 0xff, 0xff, 0xff},
		{0x10, 0, 4, 0, 0xff, 0xff, 0xff, 0xff}, {0x20, 0, 0, 0, 0xff, 0xff, 0xff, 0xff},
	} {
		acl = append(acl, e[:]...)
	}
	must(t, f.SetXattr("system.posix_acl_access", acl, 0))
	if got, err := f.GetXattr("system.posix_acl_access"); err != nil || !bytes.Equal(got, acl) {
		t.Errorf("%x, %v", got, err)
	}
	if err := f.SetXattr("system.posix_acl_access", acl[:7], 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("short list: %v", err)
	}
	must(t, f.SetAttr(SetAttr{Mask: SetMode, Mode: 0o640}))
	f.DecRef()
	finish(t, fs, img)
	fs = open(t, img, Options{ReadOnly: true})
	compareTrees(t, tree(t, fs), kernelTree(t, img))
}

// TestSharedXattrBlock: the kernel lets files of equal attributes share a block;
// changing one must leave the other alone.
func TestSharedXattrBlock(t *testing.T) {
	img := mkfs(t, 32<<20, "-b", "4096", "-I", "128")
	dir, done := kernelMount(t, img, "rw")
	value := strings.Repeat("shared", 50)
	for _, name := range []string{"a", "b", "c"} {
		hostFile(t, dir+"/"+name, map[string]string{"user.x": value, "user.y": "y"})
	}
	done()
	fs := open(t, img, Options{})
	a, err := lookup(fs, "a")
	must(t, err)
	b, err := lookup(fs, "b")
	must(t, err)
	if a.fileACL() == 0 || a.fileACL() != b.fileACL() {
		t.Fatalf("the kernel shared nothing: blocks %d and %d", a.fileACL(), b.fileACL())
	}
	must(t, a.SetXattr("user.x", []byte("mine"), 0))
	if a.fileACL() == b.fileACL() {
		t.Error("still shared")
	}
	b.DecRef()
	must(t, fs.Root().Unlink("b"))
	c, err := lookup(fs, "c")
	must(t, err)
	if v, err := c.GetXattr("user.x"); err != nil || string(v) != value {
		t.Errorf("c has %q, %v", v, err)
	}
	a.DecRef()
	c.DecRef()
	finish(t, fs, img)
}
