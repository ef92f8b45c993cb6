package ext4

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func sortStrings(s []string) { slices.Sort(s) }

// kernelMount has the kernel mount an image until done is called.
func kernelMount(t testing.TB, img, opts string) (dir string, done func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for a loop mount")
	}
	dir = t.TempDir()
	runTool(t, "mount", "-t", "ext4", "-o", "loop,"+opts, img, dir)
	mounted := true
	done = func() {
		if mounted {
			mounted = false
			var out []byte
			err := errors.New("not tried")
			for range 40 { // children of parallel tests hold descriptors for a moment
				if out, err = exec.Command("umount", dir).CombinedOutput(); err == nil {
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
			t.Fatalf("umount: %v\n%s", err, out)
		}
	}
	t.Cleanup(done)
	return dir, done
}

// kernelTree is tree as the kernel sees it.
func kernelTree(t testing.TB, img string) map[string]string {
	t.Helper()
	dir, done := kernelMount(t, img, "ro,noload")
	defer done()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(path, dir)
		switch rel {
		case "":
			return nil
		case "/lost+found":
			return fs.SkipDir
		}
		out[rel] = describeHost(t, path)
		return nil
	}))
	return out
}

func describeHost(t testing.TB, path string) string {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Lstat(path, &st))
	s := fmt.Sprintf("%o %d:%d n%d m%d.%09d b%d", st.Mode, st.Uid, st.Gid, st.Nlink, st.Mtim.Sec, st.Mtim.Nsec, st.Blocks)
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		data, err := os.ReadFile(path)
		must(t, err)
		s += fmt.Sprintf(" s%d %08x", st.Size, crc32c(0, data))
	case syscall.S_IFLNK:
		to, err := os.Readlink(path)
		must(t, err)
		s += " -> " + to
	case syscall.S_IFCHR, syscall.S_IFBLK:
		s += fmt.Sprintf(" dev %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	set := map[string][]byte{}
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	must(t, err)
	for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		v := make([]byte, 64<<10)
		m, err := unix.Lgetxattr(path, name, v)
		must(t, err)
		set[name] = v[:m]
	}
	return s + describeXattrs(set)
}

// variants are the images that mke2fs makes which the driver must read.
var variants = []struct {
	name     string
	args     []string
	writable bool
}{
	{"profile", []string{"-O", profile, "-b", "4096", "-I", "256"}, true},
	// On a file full of rubbish: nothing may be taken for zeros that nobody zeroed.
	{"rubbish", []string{"-O", profile, "-b", "4096", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"}, true},
	{"defaults", nil, true},
	{"defaults4k", []string{"-b", "4096"}, true},
	{"orphan_file", []string{"-b", "4096", "-O", "orphan_file,metadata_csum_seed"}, true},
	{"1k", []string{"-b", "1024", "-O", "metadata_csum"}, true},
	{"2k no csum", []string{"-b", "2048", "-O", "^metadata_csum,^64bit"}, true},
	{"uninit_bg", []string{"-b", "4096", "-O", "^metadata_csum,uninit_bg,^64bit"}, true},
	{"128-byte inodes", []string{"-b", "4096", "-I", "128"}, true},
	{"no dir_index", []string{"-b", "4096", "-O", "^dir_index"}, true},
	{"no flex_bg", []string{"-b", "1024", "-O", "^flex_bg,^resize_inode"}, true},
	{"no journal", []string{"-b", "4096", "-O", "^has_journal"}, true},
	{"large_dir", []string{"-b", "1024", "-O", "large_dir"}, true},
	{"meta_bg", []string{"-b", "1024", "-O", "meta_bg,^resize_inode"}, false},
	{"bigalloc", []string{"-b", "4096", "-O", "bigalloc"}, false},
	{"inline_data", []string{"-b", "4096", "-O", "inline_data"}, false},
	{"ext3", []string{"-b", "4096", "-O", "^extent,^64bit,^metadata_csum,^flex_bg"}, false},
	{"ext3 1k", []string{"-b", "1024", "-O", "^extent,^64bit,^metadata_csum,^flex_bg"}, false},
}

// fill makes a tree with some of everything through a kernel mount.
func fill(t testing.TB, img string) {
	t.Helper()
	dir, done := kernelMount(t, img, "rw")
	defer done()
	write := func(name string, data []byte) string {
		p := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must(t, os.WriteFile(p, data, 0o640))
		return p
	}
	write("empty", nil)
	write("small", []byte("small"))
	write("mid59", []byte(strings.Repeat("x", 100)))
	must(t, os.Chown(write("owned", []byte("o")), 70000, 100000))
	big := make([]byte, 700_003)
	for k := range big {
		big[k] = byte(k * k >> 7)
	}
	write("dir/sub/big", big)
	f, err := os.Create(filepath.Join(dir, "sparse"))
	must(t, err)
	for k := range 400 { // many extents, holes between
		_, err := f.WriteAt([]byte{byte(k), 1}, int64(k)*16384+int64(k))
		must(t, err)
	}
	must(t, f.Truncate(400*16384+777))
	must(t, f.Close())
	f, err = os.Create(filepath.Join(dir, "prealloc"))
	must(t, err)
	_ = unix.Fallocate(int(f.Fd()), 0, 0, 100_000) // ext3 has none
	_, err = f.WriteAt([]byte("written"), 50_000)
	must(t, err)
	must(t, f.Close())
	for n := range 700 {
		must(t, os.WriteFile(write(fmt.Sprintf("many/file-with-a-long-name-%04d-äöü", n), nil), nil, 0o600))
	}
	for n := 0; n < 700; n += 3 {
		must(t, os.Remove(filepath.Join(dir, fmt.Sprintf("many/file-with-a-long-name-%04d-äöü", n))))
	}
	for _, n := range []int{1, 59, 60, 61, 300, 1000} {
		must(t, os.Symlink(strings.Repeat("s", n), filepath.Join(dir, fmt.Sprintf("link%d", n))))
	}
	must(t, os.Link(filepath.Join(dir, "small"), filepath.Join(dir, "dir/hard")))
	must(t, unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, unix.Mknod(filepath.Join(dir, "whiteout"), unix.S_IFCHR, 0))
	must(t, unix.Mknod(filepath.Join(dir, "bigdev"), unix.S_IFBLK|0o600, int(unix.Mkdev(300, 70000))))
	must(t, unix.Mknod(filepath.Join(dir, "fifo"), unix.S_IFIFO|0o600, 0))
	must(t, unix.Mknod(filepath.Join(dir, "sock"), unix.S_IFSOCK|0o600, 0))
	for n, size := range map[string]int{"user.a": 5, "user.empty": 0, "trusted.overlay.opaque": 1, "security.capability": 20, "user.long": 500} {
		value := []byte(strings.Repeat("v", size))
		if n == "security.capability" { // must be a real one: revision 2, no capabilities
			value = append([]byte{0, 0, 0, 2}, make([]byte, 16)...)
		}
		must(t, unix.Setxattr(filepath.Join(dir, "dir/sub/big"), n, value, 0))
	}
	must(t, unix.Setxattr(filepath.Join(dir, "dir"), "trusted.overlay.opaque", []byte("y"), 0))
	for k, sec := range []int64{-1, -1 << 31, 0, 1<<31 - 1} {
		p := write(fmt.Sprintf("time%d", k), nil)
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Sec: sec, Nsec: 1}, {Sec: sec, Nsec: 999_999_999}}, 0))
	}
}

// TestFeaturesGateOpening makes every feature the driver must not write, and
// those it must not even read.
func TestFeaturesGateOpening(t *testing.T) {
	for feature, says := range map[string]string{
		"quota": "quota", "project,quota": "project", "verity": "verity", "meta_bg,^resize_inode": "meta_bg",
		"mmp": "mmp", "bigalloc": "bigalloc", "inline_data": "inline_data",
	} {
		img := mkfs(t, 32<<20, "-b", "4096", "-O", feature)
		fs := open(t, img, Options{})
		if !fs.ReadOnly() || !strings.Contains(fs.ReadOnlyReason(), says) {
			t.Errorf("%s: read-only %t because of %q", feature, fs.ReadOnly(), fs.ReadOnlyReason())
		}
		if _, err := fs.Root().Create("x", New{}); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: create: %v", feature, err)
		}
		must(t, fs.Close())
	}
	for feature, says := range map[string]string{"encrypt": "encrypt", "casefold": "casefold", "ea_inode": "ea_inode"} {
		img := mkfs(t, 32<<20, "-b", "4096", "-O", feature)
		_, err := Open(device(t, img, true), Options{ReadOnly: true})
		if !errors.Is(err, syscall.EOPNOTSUPP) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", feature, err)
		}
	}
}

// TestUncleanIsRefused: replay and repair are not this package's.
func TestUncleanIsRefused(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{ReadOnly: true})
	j, err := fs.iget(fs.sb.journalIno)
	must(t, err)
	e, _, err := j.find(0)
	must(t, err)
	// s_start of the journal superblock: the log is not empty.
	_, err = device(t, img, false).WriteAt([]byte{0, 0, 0, 1}, int64(e.phys)<<12+28)
	must(t, err)
	if _, err := Open(device(t, img, false), Options{}); !errors.Is(err, syscall.EUCLEAN) || !strings.Contains(err.Error(), "recovery") {
		t.Errorf("journal that is not empty: %v", err)
	}
	for _, c := range []struct{ request, says string }{
		{"feature needs_recovery", "needs_recovery"},
		{"ssv state 0", "not closed cleanly"},
		{"ssv state 3", "errors"},
		{"ssv last_orphan 12", "orphan"},
	} {
		img := mkfsProfile(t, 32<<20)
		runTool(t, "debugfs", "-w", "-R", c.request, img)
		_, err := Open(device(t, img, false), Options{})
		if !errors.Is(err, syscall.EUCLEAN) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.request, err)
		}
		fs, err := Open(device(t, img, true), Options{ReadOnly: true})
		if err != nil {
			t.Errorf("%s: read-only: %v", c.request, err)
		} else {
			must(t, fs.Close())
		}
	}
}

func TestReadsWhatTheKernelWrote(t *testing.T) {
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			img := mkfs(t, 64<<20, v.args...)
			fill(t, img)
			fs := open(t, img, Options{ReadOnly: true})
			got := tree(t, fs)
			must(t, fs.Close())
			compareTrees(t, got, kernelTree(t, img))
			if len(got) < 490 {
				t.Fatalf("only %d entries", len(got))
			}
			fs = open(t, img, Options{})
			if fs.ReadOnly() == v.writable {
				t.Errorf("opened for writing: read-only is %t (%s)", fs.ReadOnly(), fs.ReadOnlyReason())
			}
			finish(t, fs, img)
		})
	}
}

// hostFile makes a file with attributes under a kernel mount.
func hostFile(t testing.TB, path string, xattrs map[string]string) {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o644))
	for name, v := range xattrs {
		must(t, unix.Setxattr(path, name, []byte(v), 0))
	}
}

// TestTakingTurns has driver and kernel write the same volume one after the other.
func TestTakingTurns(t *testing.T) {
	for _, v := range variants[:4] {
		t.Run(v.name, func(t *testing.T) {
			img := mkfs(t, 64<<20, v.args...)
			m := newMachine(t, open(t, img, Options{}), uint64(time.Now().UnixNano()))
			for range 500 {
				m.step()
			}
			finish(t, m.fs, img)
			fill(t, img)
			fsck(t, img)
			fs := open(t, img, Options{})
			must(t, fs.Root().Unlink("sparse"))
			dir, err := lookup(fs, "many")
			must(t, err)
			var list []string
			must(t, dir.ReadDir(0, func(e Dirent) bool { list = append(list, e.Name); return true }))
			for n, name := range list {
				if n%2 == 0 {
					must(t, dir.Unlink(name))
				}
				f, err := dir.Create(fmt.Sprintf("file-of-the-driver-%d", n), New{Mode: 0o600})
				must(t, err)
				f.DecRef()
			}
			dir.DecRef()
			finish(t, fs, img)
			host, done := kernelMount(t, img, "rw")
			must(t, os.RemoveAll(filepath.Join(host, "many")))
			must(t, os.WriteFile(filepath.Join(host, "last"), make([]byte, 100_000), 0o600))
			done()
			fsck(t, img)
			fs = open(t, img, Options{})
			got := tree(t, fs)
			finish(t, fs, img)
			compareTrees(t, got, kernelTree(t, img))
		})
	}
}
