package ext4

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gvx.dev/gvx/native/internal/blockdev"
)

// profile is the feature list of the volumes ext4lite makes (docs of the project: the volume).
const profile = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file," +
	"dir_nlink,extra_isize,metadata_csum,metadata_csum_seed"

func TestMain(m *testing.M) {
	// Where e2fsprogs live is not in an ordinary user's path.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		panic(err)
	}
	// Images in memory where there is room: the tests wait for the disk otherwise.
	var st syscall.Statfs_t
	if os.Getenv("TMPDIR") == "" && syscall.Statfs("/dev/shm", &st) == nil && int64(st.Bavail)*st.Bsize > 2<<30 {
		if err := os.Setenv("TMPDIR", "/dev/shm"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// runTool runs a tool and gives its output; it fails the test when the tool does.
func runTool(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// mkfs makes an image with mke2fs: sparse, or with "nodiscard" on a file full of rubbish.
func mkfs(t testing.TB, size int64, args ...string) string {
	t.Helper()
	img := filepath.Join(t.TempDir(), "volume.ext4")
	f, err := os.Create(img)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(strings.Join(args, " "), "nodiscard") {
		if _, err := f.WriteAt(bytes.Repeat([]byte{0xA5}, int(size)), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	runTool(t, "mke2fs", append(append([]string{"-q", "-F", "-t", "ext4"}, args...), img)...)
	return img
}

// mkfsProfile makes an image like ext4lite's.
func mkfsProfile(t testing.TB, size int64, args ...string) string {
	t.Helper()
	return mkfs(t, size, append([]string{"-O", profile, "-b", "4096", "-I", "256", "-m", "0"}, args...)...)
}

// device opens an image as a device until the test ends.
func device(t testing.TB, img string, readOnly bool) blockdev.Device {
	t.Helper()
	mode := os.O_RDWR
	if readOnly {
		mode = os.O_RDONLY
	}
	f, err := os.OpenFile(img, mode, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	dev, err := blockdev.NewFile(int(f.Fd()), readOnly)
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

func open(t testing.TB, img string, o Options) *FS {
	t.Helper()
	fs, err := Open(device(t, img, o.ReadOnly), o)
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

// finish closes the volume and has it judged.
func finish(t testing.TB, fs *FS, img string) {
	t.Helper()
	for _, err := range fs.Check() {
		t.Error(err)
	}
	if err := fs.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	fsck(t, img)
}

// fsck is the judge of every image left behind.
func fsck(t testing.TB, img string) {
	t.Helper()
	out, err := exec.Command("e2fsck", "-fn", img).CombinedOutput()
	if err != nil {
		t.Fatalf("e2fsck -fn: %v\n%s", err, out)
	}
}

// must fails the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// lookup resolves a slash-separated path; the caller owns a reference.
func lookup(fs *FS, path string) (*Inode, error) {
	i := fs.Root()
	i.IncRef()
	for _, name := range strings.Split(path, "/") {
		if name == "" {
			continue
		}
		next, err := i.Lookup(name)
		i.DecRef()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		i = next
	}
	return i, nil
}

// mkfile makes a file with contents.
func mkfile(t testing.TB, dir *Inode, name string, data []byte) *Inode {
	t.Helper()
	i, err := dir.Create(name, New{Mode: 0o644})
	if err != nil {
		t.Fatalf("create %q: %v", name, err)
	}
	if _, err := i.WriteAt(data, 0); err != nil {
		t.Fatalf("write %q: %v", name, err)
	}
	return i
}

func mkdir(t testing.TB, dir *Inode, name string) *Inode {
	t.Helper()
	i, err := dir.Create(name, New{Mode: syscall.S_IFDIR | 0o755})
	if err != nil {
		t.Fatalf("mkdir %q: %v", name, err)
	}
	return i
}

// contents reads a whole file.
func contents(i *Inode) ([]byte, error) {
	p := make([]byte, i.Size())
	n, err := i.ReadAt(p, 0)
	return p[:n], err
}

// tree lists everything below the root, one line an entry, without lost+found.
func tree(t testing.TB, fs *FS) map[string]string {
	t.Helper()
	out := map[string]string{}
	var walk func(dir *Inode, at string)
	walk = func(dir *Inode, at string) {
		type entry struct {
			name string
			typ  uint8
		}
		var list []entry
		must(t, dir.ReadDir(0, func(e Dirent) bool {
			list = append(list, entry{e.Name, e.Type})
			return true
		}))
		for _, e := range list {
			if at == "" && e.name == "lost+found" {
				continue
			}
			i, err := dir.Lookup(e.name)
			if err != nil {
				t.Fatalf("%s/%s: %v", at, e.name, err)
			}
			if i.direntType() != e.typ {
				t.Errorf("%s/%s: entry of type %d, inode of type %d", at, e.name, e.typ, i.direntType())
			}
			out[at+"/"+e.name] = describe(t, i)
			if i.isDir() {
				walk(i, at+"/"+e.name)
			}
			i.DecRef()
		}
	}
	walk(fs.Root(), "")
	return out
}

// describe tells all that a mount shows of an inode, in the form of describeHost.
func describe(t testing.TB, i *Inode) string {
	t.Helper()
	a := i.Attr()
	s := fmt.Sprintf("%o %d:%d n%d m%d.%09d b%d", a.Mode, a.UID, a.GID, a.Nlink, a.Mtime.Sec, a.Mtime.Nsec, a.Blocks512)
	switch a.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		data, err := contents(i)
		must(t, err)
		s += fmt.Sprintf(" s%d %08x", a.Size, crc32c(0, data))
	case syscall.S_IFLNK:
		to, err := i.Readlink()
		must(t, err)
		s += " -> " + to
	case syscall.S_IFCHR, syscall.S_IFBLK:
		s += fmt.Sprintf(" dev %d:%d", a.RdevMajor, a.RdevMinor)
	}
	names, err := i.ListXattr()
	must(t, err)
	set := map[string][]byte{}
	for _, n := range names {
		v, err := i.GetXattr(n)
		must(t, err)
		set[n] = v
	}
	return s + describeXattrs(set)
}

func describeXattrs(set map[string][]byte) string {
	var names []string
	for n := range set {
		names = append(names, n)
	}
	sortStrings(names)
	var b bytes.Buffer
	for _, n := range names {
		fmt.Fprintf(&b, " %s=%08x/%d", n, crc32c(0, set[n]), len(set[n]))
	}
	return b.String()
}

// compareTrees reports the first differences.
func compareTrees(t testing.TB, got, want map[string]string) {
	t.Helper()
	bad := 0
	for p, w := range want {
		if g, ok := got[p]; !ok || g != w {
			t.Errorf("%s:\n got  %s\n want %s", p, g, w)
			if bad++; bad > 10 {
				return
			}
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s: should not be there", p)
			if bad++; bad > 10 {
				return
			}
		}
	}
}
