package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestFragmentedFile makes 10,000 extents: a deep tree, built out of order, cut
// from both ends and in the middle until nothing is left.
func TestFragmentedFile(t *testing.T) {
	for _, bs := range []string{"1024", "4096"} {
		img := mkfs(t, 256<<20, "-b", bs, "-O", "metadata_csum")
		fs := open(t, img, Options{CacheBytes: 1}) // so that nodes are evicted all the time
		f := mkfile(t, fs.Root(), "f", nil)
		const count = 10_000
		step := 2 * fs.BlockSize()
		order := make([]int, 0, count)
		for n := range count { // forwards, backwards and every third in between
			switch n % 3 {
			case 0:
				order = append(order, n)
			case 1:
				order = append([]int{n}, order...)
			}
		}
		for n := 2; n < count; n += 3 {
			order = append(order, n)
		}
		for _, n := range order {
			_, err := f.WriteAt([]byte{byte(n), byte(n >> 8), 1}, int64(n)*step)
			must(t, err)
		}
		depth := nodeDepth(f.root())
		if want := map[string]int{"1024": 2, "4096": 2}[bs]; depth < want {
			t.Errorf("%s: tree of depth %d, want %d", bs, depth, want)
		}
		check := func(n int, there bool) {
			t.Helper()
			var p [3]byte
			k, err := f.ReadAt(p[:], int64(n)*step)
			must(t, err)
			if want := [3]byte{byte(n), byte(n >> 8), 1}; there && (k != 3 || p != want) || !there && k > 0 && p != [3]byte{} {
				t.Fatalf("%s: piece %d: %v (%d)", bs, n, p, k)
			}
		}
		for n := range count {
			check(n, true)
		}
		for n := 1; n < count-1000; n += 2 { // every other one
			if n%100 == 1 {
				must(t, fs.Sync())
			}
			must(t, f.Fallocate(FallocPunchHole|FallocKeepSize, int64(n)*step, fs.BlockSize()))
		}
		for n := range count {
			check(n, n%2 == 0 || n >= count-1000)
		}
		must(t, f.Fallocate(FallocPunchHole|FallocKeepSize, 0, 4000*step))
		must(t, f.Truncate(8000*step))
		for n := range 8000 {
			check(n, n >= 4000 && n%2 == 0)
		}
		f.DecRef()
		finish(t, fs, img)
		fs = open(t, img, Options{})
		f, err := lookup(fs, "f")
		must(t, err)
		for n := range 8000 {
			check(n, n >= 4000 && n%2 == 0)
		}
		must(t, f.Truncate(0))
		if a := f.Attr(); a.Blocks512 != 0 || nodeDepth(f.root()) != 0 {
			t.Errorf("%s: emptied, it has %d sectors and depth %d", bs, a.Blocks512, nodeDepth(f.root()))
		}
		f.DecRef()
		finish(t, fs, img)
	}
}

// extentsOf counts the extents of a file.
func extentsOf(t testing.TB, f *Inode) int {
	t.Helper()
	x, err := f.Extents(0, f.Size(), false)
	must(t, err)
	return len(x)
}

// TestParallelAppendsStayContiguous appends to several files in turn.
func TestParallelAppendsStayContiguous(t *testing.T) {
	img := mkfsProfile(t, 512<<20)
	fs := open(t, img, Options{NoDiscard: true})
	var files []*Inode
	for n := range 8 {
		files = append(files, mkfile(t, fs.Root(), fmt.Sprint(n), nil))
	}
	chunk := bytes.Repeat([]byte("chunk"), 32<<10/5)
	for range 200 {
		for _, f := range files {
			_, err := f.WriteAt(chunk, f.Size())
			must(t, err)
		}
	}
	for n, f := range files {
		if x := extentsOf(t, f); x > 16 {
			t.Errorf("file %d has %d extents for 200 appends", n, x)
		}
		f.DecRef()
	}
	finish(t, fs, img)
}

// TestFullVolume fills a volume to the last block and goes on living.
func TestFullVolume(t *testing.T) {
	img := mkfsProfile(t, 24<<20, "-O", "^has_journal")
	fs := open(t, img, Options{})
	free := fs.Statfs().Free
	f := mkfile(t, fs.Root(), "f", nil)
	p := make([]byte, 1<<20)
	var written int64
	var err error
	for err == nil {
		var n int
		n, err = f.WriteAt(p, written)
		written += int64(n)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if left := fs.Statfs().Free; left != 0 {
		t.Errorf("%d of %d blocks are left at ENOSPC", left, free)
	}
	if written>>12 < int64(free)-8 {
		t.Errorf("wrote %d blocks into %d", written>>12, free)
	}
	if _, err := fs.Root().Create("d", New{Mode: syscall.S_IFDIR}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("mkdir: %v", err)
	}
	if _, err := fs.Root().Create("l", New{Mode: syscall.S_IFLNK, Target: strings.Repeat("t", 100)}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("symlink: %v", err)
	}
	g, err := fs.Root().Create("empty", New{})
	must(t, err)
	if err := g.SetXattr("user.big", make([]byte, 1000), 0); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("xattr: %v", err)
	}
	if _, err := g.Extents(0, 4096, true); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("extents: %v", err)
	}
	if err := g.Fallocate(0, 0, 4096); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("fallocate: %v", err)
	}
	g.DecRef()
	// Names go on until a directory block more is needed; then nothing is left of
	// what was tried.
	var made []string
	for err = nil; err == nil; {
		name := fmt.Sprintf("name-%d-%s", len(made), strings.Repeat("n", 100))
		var x *Inode
		if x, err = fs.Root().Create(name, New{}); err == nil {
			made = append(made, name)
			x.DecRef()
		}
	}
	inodes := fs.Statfs().FreeInodes
	if !errors.Is(err, syscall.ENOSPC) || inodes == 0 {
		t.Errorf("after %d names: %v, %d inodes free", len(made), err, inodes)
	}
	long := strings.Repeat("l", 200)
	if err := fs.Root().Link(long, f); !errors.Is(err, syscall.ENOSPC) || f.Attr().Nlink != 1 {
		t.Errorf("link: %v, %d links", err, f.Attr().Nlink)
	}
	if err := fs.Rename(fs.Root(), "f", fs.Root(), long, RenameWhiteout); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("rename: %v", err)
	}
	if now := fs.Statfs().FreeInodes; now != inodes {
		t.Errorf("%d inodes free, %d before what failed", now, inodes)
	}
	for _, name := range made {
		must(t, fs.Root().Unlink(name))
	}
	must(t, f.Truncate(written-8192))
	mkdir(t, fs.Root(), "d").DecRef()
	must(t, fs.Root().Rmdir("d"))
	must(t, f.Truncate(0))
	f.DecRef()
	must(t, fs.Root().Unlink("f"))
	must(t, fs.Root().Unlink("empty"))
	if now := fs.Statfs().Free; now != free {
		t.Errorf("%d blocks free, %d before", now, free)
	}
	finish(t, fs, img)
}

// TestNoInodesLeft is the other way to be full.
func TestNoInodesLeft(t *testing.T) {
	img := mkfsProfile(t, 16<<20, "-N", "64", "-O", "^has_journal")
	fs := open(t, img, Options{})
	var err error
	n := 0
	for ; err == nil; n++ {
		var f *Inode
		if f, err = fs.Root().Create(fmt.Sprint(n), New{}); err == nil {
			f.DecRef()
		}
	}
	if !errors.Is(err, syscall.ENOSPC) || fs.Statfs().FreeInodes != 0 {
		t.Errorf("after %d: %v, %d inodes free", n, err, fs.Statfs().FreeInodes)
	}
	must(t, fs.Root().Unlink("0"))
	f, err := fs.Root().Create("again", New{})
	must(t, err)
	f.DecRef()
	finish(t, fs, img)
}

// TestUnlinkedButOpen: the inode lives until the last reference, and is on the
// orphan list of a volume that was never closed.
func TestUnlinkedButOpen(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	free := fs.Statfs()
	var files []*Inode
	for n := range 5 {
		files = append(files, mkfile(t, fs.Root(), fmt.Sprint(n), bytes.Repeat([]byte{byte(n)}, 10_000)))
		must(t, fs.Root().Unlink(fmt.Sprint(n)))
	}
	tmp, err := fs.CreateTmp(New{Mode: 0o600})
	must(t, err)
	_, err = tmp.WriteAt([]byte("temporary"), 0)
	must(t, err)
	dir := mkdir(t, fs.Root(), "dir")
	must(t, fs.Root().Rmdir("dir"))
	if _, err := dir.Create("x", New{}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("create in a removed directory: %v", err)
	}
	if got, err := contents(files[3]); err != nil || len(got) != 10_000 || got[0] != 3 {
		t.Errorf("unlinked file: %d bytes (%v)", len(got), err)
	}
	if err := fs.Root().Link("back", files[0]); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("link of an unlinked file: %v", err)
	}

	// A copy taken now is what a killed process leaves: replay settles the orphans.
	must(t, fs.Sync())
	crashed := img + ".crashed"
	copyFile(t, img, crashed)
	if _, err := Open(device(t, crashed, false), Options{}); !errors.Is(err, syscall.EUCLEAN) {
		t.Errorf("open of a volume that was never closed: %v", err)
	}
	out := runTool(t, "e2fsck", "-fp", crashed)
	if n := strings.Count(out, "Clearing orphaned inode"); n != 7 {
		t.Errorf("e2fsck cleared %d orphans, want 7:\n%s", n, out)
	}
	fsck(t, crashed)

	must(t, fs.Root().Link("kept", tmp)) // O_TMPFILE, then linkat
	tmp.DecRef()
	files[2].DecRef() // from the middle of the list
	files[0].DecRef()
	files[4].DecRef()
	kept, err := lookup(fs, "kept")
	must(t, err)
	if got, err := contents(kept); err != nil || string(got) != "temporary" {
		t.Errorf("kept: %q %v", got, err)
	}
	kept.DecRef()
	// files[1], files[3] and dir are still referenced when Close comes.
	finish(t, fs, img)
	fs = open(t, img, Options{})
	must(t, fs.Root().Unlink("kept"))
	if now := fs.Statfs(); now.Free != free.Free || now.FreeInodes != free.FreeInodes {
		t.Errorf("%d blocks and %d inodes free, before %d and %d", now.Free, now.FreeInodes, free.Free, free.FreeInodes)
	}
	finish(t, fs, img)
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	src, err := os.Open(from)
	must(t, err)
	defer src.Close()
	dst, err := os.Create(to)
	must(t, err)
	_, err = io.Copy(dst, src)
	must(t, err)
	must(t, dst.Close())
}

// TestTimes covers what fits: 1901 to 2446, nanoseconds, and 128-byte inodes to 2038.
func TestTimes(t *testing.T) {
	for _, size := range []string{"256", "128"} {
		img := mkfs(t, 32<<20, "-b", "4096", "-I", size)
		birth := time.Date(2100, 5, 6, 7, 8, 9, 987654321, time.UTC)
		fs := open(t, img, Options{Now: func() time.Time { return birth }})
		want := map[string]int64{}
		for n, sec := range []int64{0, -1, -1 << 31, -1<<31 - 5, 1<<31 - 1, 1 << 31, 1<<32 + 5, 1 << 33, maxSec, maxSec + 1, 4102444800} {
			name := fmt.Sprint(n)
			f := mkfile(t, fs.Root(), name, nil)
			if cr := f.Attr().Crtime; size == "256" && cr != (Timespec{birth.Unix(), 987654321}) {
				t.Errorf("born at %+v", cr)
			}
			must(t, f.SetAttr(SetAttr{Mask: SetMtime | SetAtime, Mtime: Timespec{sec, 123456789}, Atime: Timespec{sec, 1}}))
			last := int64(maxSec)
			if size == "128" {
				last = maxSecSmall
			}
			want[name] = min(max(sec, minSec), last)
			f.DecRef()
		}
		finish(t, fs, img)
		fs = open(t, img, Options{ReadOnly: true})
		for name, sec := range want {
			f, err := lookup(fs, name)
			must(t, err)
			if got := f.Attr().Mtime.Sec; got != sec {
				t.Errorf("inode size %s, file %s: mtime %d, want %d", size, name, got, sec)
			}
			f.DecRef()
		}
		compareTrees(t, tree(t, fs), kernelTree(t, img))
	}
}

// TestBeforeFree: the hook sees every range that leaves a file, while the blocks
// are still the file's alone.
func TestBeforeFree(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	type call struct{ off, n int64 }
	var calls []call
	fs := open(t, img, Options{BeforeFree: func(i *Inode, off, n int64) {
		calls = append(calls, call{off, n})
		if i.Attr().Nlink > 0 {
			x, err := i.Extents(off, n, false) // allowed here, and the map is empty already
			if err != nil || len(x) != 1 || !x[0].Hole {
				t.Errorf("map inside the hook: %+v, %v", x, err)
			}
		}
	}})
	f := mkfile(t, fs.Root(), "f", make([]byte, 100_000))
	must(t, f.Truncate(50_000))
	must(t, f.Fallocate(FallocPunchHole|FallocKeepSize, 5000, 20_000))
	must(t, fs.Root().Unlink("f"))
	f.DecRef()
	want := []call{{53248, 49152}, {8192, 16384}, {0, 53248}}
	if fmt.Sprint(calls) != fmt.Sprint(want) {
		t.Errorf("calls %v, want %v", calls, want)
	}
	finish(t, fs, img)
}

// TestExtentsInPlace: what Extents gives is where the bytes are.
func TestExtentsInPlace(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", []byte("head"))
	x, err := f.Extents(10_000, 5000, true)
	must(t, err)
	if len(x) != 1 || x[0].FileOff != 8192 || x[0].Len != 8192 || x[0].Hole {
		t.Fatalf("extents %+v", x)
	}
	_, err = fs.dev.WriteAt([]byte("in place"), x[0].DevOff+1808)
	must(t, err)
	must(t, f.SetSize(10_008))
	got, err := contents(f)
	must(t, err)
	want := append([]byte("head"), make([]byte, 9996)...)
	if want = append(want, "in place"...); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes, ending %q", len(got), got[len(got)-12:])
	}
	// Allocated behind the end and never reached: gone with the last reference.
	_, err = f.Extents(1<<20, 4096, true)
	must(t, err)
	f.DecRef()
	finish(t, fs, img)
}

// TestCallbackFails: a piece whose data could not be stored stays a hole.
func TestCallbackFails(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	free := fs.Statfs().Free
	f := mkfile(t, fs.Root(), "f", nil)
	n, err := f.WriteFunc(0, 100_000, func(devOff, off, n int64) error { return syscall.EFAULT })
	if n != 0 || !errors.Is(err, syscall.EFAULT) {
		t.Errorf("%d, %v", n, err)
	}
	if a := f.Attr(); a.Size != 0 || a.Blocks512 != 0 || fs.Statfs().Free != free {
		t.Errorf("size %d, %d sectors, %d blocks gone", a.Size, a.Blocks512, free-fs.Statfs().Free)
	}
	must(t, f.Fallocate(0, 0, 50_000))
	if _, err := f.WriteFunc(100, 1000, func(devOff, off, n int64) error { return syscall.EFAULT }); !errors.Is(err, syscall.EFAULT) {
		t.Error(err)
	}
	if got, err := contents(f); err != nil || !bytes.Equal(got, make([]byte, 50_000)) {
		t.Errorf("not zeros: %v", err)
	}
	f.DecRef()
	finish(t, fs, img)
}

// TestFlags: settable ones are kept by others and by the kernel's tools.
func TestFlags(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", []byte("x"))
	must(t, f.SetAttr(SetAttr{Mask: SetFlags, Flags: FlagImmutable | FlagAppend | flagIndex}))
	if got := f.Attr().Flags; got != FlagImmutable|FlagAppend|flagExtents {
		t.Errorf("flags %#x", got)
	}
	f.DecRef()
	finish(t, fs, img)
	if out := runTool(t, "debugfs", "-R", "stat f", img); !strings.Contains(out, "Flags: 0x80030") {
		t.Error(out)
	}
}

// TestHugeSparseFile crosses 2 GiB, 4 GiB and the largest size.
func TestHugeSparseFile(t *testing.T) {
	img := mkfs(t, 32<<20, "-b", "4096", "-O", "^large_file")
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", nil)
	last := fs.maxSize() - 3
	for _, off := range []int64{1<<31 - 2, 1<<32 - 2, 1 << 40, last} {
		_, err := f.WriteAt([]byte("abc"), off)
		must(t, err)
	}
	if n, err := f.WriteAt([]byte("abcd"), last); n != 3 || !errors.Is(err, syscall.EFBIG) {
		t.Errorf("write over the limit: %d, %v", n, err)
	}
	if err := f.Truncate(fs.maxSize() + 1); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("truncate over the limit: %v", err)
	}
	data, err := f.SeekData(1 << 33)
	if err != nil || data != 1<<40 {
		t.Errorf("data at %d, %v", data, err)
	}
	f.DecRef()
	finish(t, fs, img)
}

// TestLargeBlocks: 64 KiB, which lengths of entries only just express. The
// kernel mounts none of these; e2fsck judges.
func TestLargeBlocks(t *testing.T) {
	for _, bs := range []string{"16384", "65536"} {
		img := mkfs(t, 256<<20, "-b", bs, "-O", "metadata_csum")
		fs := open(t, img, Options{})
		m := newMachine(t, fs, uint64(time.Now().UnixNano()))
		dir := mkdir(t, fs.Root(), "many")
		for n := range 1000 {
			f, err := dir.Create(fmt.Sprintf("%d-%s", n, strings.Repeat("n", 200)), New{})
			must(t, err)
			f.DecRef()
		}
		for n := range 1000 {
			must(t, dir.Unlink(fmt.Sprintf("%d-%s", n, strings.Repeat("n", 200))))
		}
		dir.DecRef()
		must(t, fs.Root().Rmdir("many"))
		for range 600 {
			m.step()
		}
		m.verify()
		finish(t, fs, img)
		m.fs = open(t, img, Options{})
		m.verify()
		finish(t, m.fs, img)
	}
}

// TestHandles: one handle an inode, also by number.
func TestHandles(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	now := time.Unix(1000, 5)
	fs := open(t, img, Options{Now: func() time.Time { return now }, Durable: true})
	f := mkfile(t, fs.Root(), "f", []byte("x"))
	g, err := fs.Inode(f.Ino())
	must(t, err)
	if f != g || f.FS() != fs || f.Generation() != g.Generation() {
		t.Error("two handles of one inode")
	}
	g.DecRef()
	for _, ino := range []uint32{0, 1, 7, f.Ino() + 1, 1 << 30} {
		if _, err := fs.Inode(ino); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("inode %d: %v", ino, err)
		}
	}
	now = time.Unix(2000, 7)
	must(t, f.Touch(SetAtime|SetCtime))
	want := [3]Timespec{{2000, 7}, {1000, 5}, {2000, 7}}
	if a := f.Attr(); [3]Timespec{a.Atime, a.Mtime, a.Ctime} != want {
		t.Errorf("times %v", a)
	}
	must(t, f.Sync(true))
	f.DecRef()
	finish(t, fs, img)
	if err := fs.Sync(); !errors.Is(err, syscall.EBADF) {
		t.Errorf("sync of a closed volume: %v", err)
	}
	must(t, fs.Close())
}

// TestUnpackedFilesAreContiguous writes files as an archive is unpacked: one
// after the other, in pieces of 32 KiB, with their descriptor closed late.
func TestUnpackedFilesAreContiguous(t *testing.T) {
	img := mkfsProfile(t, 1<<30)
	fs := open(t, img, Options{NoDiscard: true})
	rnd := rand.New(rand.NewPCG(1, 1))
	piece := make([]byte, 32<<10)
	var kept []*Inode
	broken, total := 0, 0
	for d := range 20 {
		dir := mkdir(t, fs.Root(), fmt.Sprint(d))
		for n := range 40 {
			f := mkfile(t, dir, fmt.Sprint(n), nil)
			size := 1 + rnd.Int64N(1<<rnd.IntN(21))
			for off := int64(0); off < size; off += int64(len(piece)) {
				_, err := f.WriteAt(piece[:min(int64(len(piece)), size-off)], off)
				must(t, err)
			}
			total++
			if extentsOf(t, f) > 1 {
				broken++
			}
			kept = append(kept, f)
		}
		dir.DecRef()
	}
	if broken > total/50 {
		t.Errorf("%d of %d files are not in one piece", broken, total)
	}
	big := mkfile(t, fs.Root(), "big", nil)
	for off := int64(0); off < 100<<20; off += 1 << 20 {
		_, err := big.WriteAt(make([]byte, 1<<20), off)
		must(t, err)
	}
	if x := extentsOf(t, big); x > 6 {
		t.Errorf("a file of 100 MiB has %d extents", x)
	}
	t.Logf("%d of %d files broken, big file of %d extents", broken, total, extentsOf(t, big))
	big.DecRef()
	for _, f := range kept {
		f.DecRef()
	}
	finish(t, fs, img)
}
