package ext4

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// names lists a directory.
func names(t testing.TB, dir *Inode) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	must(t, dir.ReadDir(0, func(e Dirent) bool {
		if out[e.Name] {
			t.Errorf("%q twice", e.Name)
		}
		out[e.Name] = true
		return true
	}))
	return out
}

// TestManyFiles makes 20,000 entries, deletes half and adds some again, with
// the index at two levels.
func TestManyFiles(t *testing.T) {
	const count = 20_000
	img := mkfsProfile(t, 256<<20, "-N", "30000")
	fs := open(t, img, Options{})
	dir := mkdir(t, fs.Root(), "dir")
	target := mkfile(t, dir, "target", []byte("x"))
	pad := strings.Repeat("p", 60)
	name := func(n int) string { return fmt.Sprintf("%06d-%s-é", n, pad) }
	for n := range count {
		f, err := dir.Create(name(n), New{Mode: 0o600})
		if err != nil {
			t.Fatalf("entry %d: %v", n, err)
		}
		f.DecRef()
	}
	root, err := dir.dirBlock(0)
	must(t, err)
	if levels := root.data[rootInfoAt+6]; levels != 1 {
		t.Errorf("index has %d levels, want 1: the test is too small", levels)
	}
	must(t, fs.Sync())
	for n := 0; n < count; n += 2 {
		must(t, dir.Unlink(name(n)))
	}
	for n := 0; n < count; n += 20 {
		must(t, dir.Link(name(n), target))
	}
	want := count/2 + count/20 + 1
	if got := names(t, dir); len(got) != want {
		t.Fatalf("%d entries, want %d", len(got), want)
	}
	target.DecRef()
	dir.DecRef()
	finish(t, fs, img)

	fs = open(t, img, Options{ReadOnly: true, CacheBytes: 1}) // hardly any cache
	dir, err = lookup(fs, "dir")
	must(t, err)
	if got := names(t, dir); len(got) != want {
		t.Fatalf("%d entries read again, want %d", len(got), want)
	}
	if _, err := dir.Lookup(name(2)); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("deleted name: %v", err)
	}
	f, err := dir.Lookup(name(1))
	must(t, err)
	f.DecRef()
	compareTrees(t, tree(t, fs), kernelTree(t, img))
}

// TestKernelFindsByHash: the kernel's lookup goes by hash only, so names above
// 0x7f and both kinds of hashing must agree with ours.
func TestKernelFindsByHash(t *testing.T) {
	for _, flags := range []int{1, 2} { // signed, unsigned
		for _, version := range []string{"legacy", "half_md4", "tea"} {
			img := mkfs(t, 32<<20, "-b", "1024", "-O", "metadata_csum")
			runTool(t, "tune2fs", "-E", "hash_alg="+version, img)
			runTool(t, "debugfs", "-w", "-R", fmt.Sprintf("ssv flags %d", flags), img)
			fs := open(t, img, Options{})
			if want := flags == 2; fs.sb.unsignedHash != want {
				t.Fatalf("unsigned hash %t", fs.sb.unsignedHash)
			}
			dir := mkdir(t, fs.Root(), "dir")
			for n := range 800 {
				f, err := dir.Create(fmt.Sprintf("n\xff\x80%c-%d-äöü", rune(0x80+n), n), New{})
				must(t, err)
				f.DecRef()
			}
			dir.DecRef()
			finish(t, fs, img)
			if got := kernelTree(t, img); len(got) != 801 {
				t.Errorf("%s, flags %d: the kernel sees %d entries", version, flags, len(got))
			}
		}
	}
}

// TestHashIsDebugfs compares with e2fsprogs' own hashing.
func TestHashIsDebugfs(t *testing.T) {
	img := mkfsProfile(t, 16<<20)
	fs := open(t, img, Options{ReadOnly: true})
	seed := fs.sb.uuidString(fs.superB.data[fs.superAt+sHashSeed:])
	for version, alg := range map[uint8]string{hashLegacy: "legacy", hashHalfMD4: "half_md4", hashTea: "tea"} {
		for _, name := range []string{"a", "lost+found", strings.Repeat("x", 31), strings.Repeat("y", 32), strings.Repeat("z", 33), strings.Repeat("w", 255)} {
			out := runTool(t, "debugfs", "-R", fmt.Sprintf("dx_hash -h %s -s %s %s", alg, seed, name), img)
			hash, ok := fs.sb.dirHash(version, name)
			if want := fmt.Sprintf("is 0x%x", hash); !ok || !strings.Contains(out, want) {
				t.Errorf("%s of %.10q…: %s, want %s", alg, name, out, want)
			}
		}
	}
	must(t, fs.Close())
}

// uuidString spells 16 bytes as a UUID.
func (sb *super) uuidString(b []byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// TestCollidingNames fills leaves with pairs of names of one hash, so that splits
// part some and the index has to say that a hash goes on in the next block.
func TestCollidingNames(t *testing.T) {
	img := mkfs(t, 32<<20, "-b", "1024", "-O", "metadata_csum")
	runTool(t, "tune2fs", "-E", "hash_alg=legacy", img)
	fs := open(t, img, Options{})
	seen := map[uint32]string{}
	var pairs []string
	for n := 0; len(pairs) < 200; n++ {
		name := fmt.Sprintf("%x%s", n*7919, strings.Repeat("c", 40))
		h, _ := fs.sb.dirHash(hashLegacy, name)
		if other, ok := seen[h]; ok {
			pairs = append(pairs, other, name)
			delete(seen, h)
			continue
		}
		seen[h] = name
	}
	dir := mkdir(t, fs.Root(), "dir")
	for _, name := range pairs {
		f, err := dir.Create(name, New{})
		must(t, err)
		f.DecRef()
	}
	root, err := dir.dirBlock(0)
	must(t, err)
	parted := 0
	for k := 1; k < indexCount(root.data, 0); k++ {
		if hash, _ := indexEntry(root.data, 0, k); hash&1 != 0 {
			parted++
		}
	}
	if parted == 0 {
		t.Error("no split parted a pair: the test shows nothing")
	}
	dir.DecRef()
	finish(t, fs, img)
	if got := kernelTree(t, img); len(got) != len(pairs)+1 {
		t.Errorf("the kernel sees %d entries", len(got))
	}
}

// TestIndexFull: without large_dir two levels of index are all there is; with it
// there is a third.
func TestIndexFull(t *testing.T) {
	const limit = 60_000
	for _, feature := range []string{"^large_dir", "large_dir"} {
		img := mkfs(t, 64<<20, "-b", "1024", "-O", "metadata_csum,^has_journal,"+feature, "-N", "256")
		fs := open(t, img, Options{})
		dir := mkdir(t, fs.Root(), "dir")
		target := mkfile(t, fs.Root(), "target", nil)
		pad := strings.Repeat("p", 246)
		var err error
		made := 0
		for ; made < limit; made++ {
			if err = dir.Link(fmt.Sprintf("%06d%s", made, pad), target); err != nil {
				break
			}
			if root, err := dir.dirBlock(0); made%500 == 0 && err == nil && root.data[rootInfoAt+6] == 2 {
				break
			}
		}
		if fs.ReadOnly() {
			t.Fatal("became read-only")
		}
		root, rerr := dir.dirBlock(0)
		must(t, rerr)
		levels := root.data[rootInfoAt+6]
		if feature == "large_dir" {
			if err != nil || levels != 2 {
				t.Errorf("after %d entries: %v, %d levels", made, err, levels)
			}
		} else if !errors.Is(err, syscall.ENOSPC) || levels != 1 {
			t.Errorf("after %d entries: %v, %d levels", made, err, levels)
		}
		if free := fs.Statfs().Free; free < 5000 {
			t.Errorf("the volume was full (%d blocks free), not the index", free)
		}
		if err == nil {
			made++
		}
		if got := names(t, dir); len(got) != made {
			t.Errorf("%d entries, made %d", len(got), made)
		}
		for n := 0; n < made; n += 7 {
			must(t, dir.Unlink(fmt.Sprintf("%06d%s", n, pad)))
		}
		target.DecRef()
		dir.DecRef()
		finish(t, fs, img)
	}
}

// TestLinearStaysLinear: a directory that grew without an index keeps none.
func TestLinearStaysLinear(t *testing.T) {
	img := mkfs(t, 32<<20, "-b", "1024", "-O", "^dir_index")
	fs := open(t, img, Options{})
	dir := mkdir(t, fs.Root(), "dir")
	for n := range 200 {
		f, err := dir.Create(fmt.Sprintf("before-%d", n), New{})
		must(t, err)
		f.DecRef()
	}
	dir.DecRef()
	finish(t, fs, img)
	runTool(t, "tune2fs", "-O", "dir_index", img)
	fs = open(t, img, Options{})
	dir, err := lookup(fs, "dir")
	must(t, err)
	for n := range 200 {
		f, err := dir.Create(fmt.Sprintf("after-%d", n), New{})
		must(t, err)
		f.DecRef()
	}
	if dir.Attr().Flags&flagIndex != 0 {
		t.Error("has an index now")
	}
	dir.DecRef()
	finish(t, fs, img)
	if got := kernelTree(t, img); len(got) != 401 {
		t.Errorf("the kernel sees %d entries", len(got))
	}
}

// TestCookiesAreStable changes a directory between the calls of a reading.
func TestCookiesAreStable(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	dir := mkdir(t, fs.Root(), "dir")
	for n := range 1000 {
		f, err := dir.Create(fmt.Sprintf("old-%04d", n), New{})
		must(t, err)
		f.DecRef()
	}
	seen := map[string]int{}
	cookie, rounds := int64(0), 0
	for {
		n := 0
		must(t, dir.ReadDir(cookie, func(e Dirent) bool {
			if n == 50 {
				return false
			}
			seen[e.Name]++
			cookie = e.Next
			n++
			return true
		}))
		if n == 0 {
			break
		}
		if rounds++; rounds > 100 {
			t.Fatal("no end")
		}
		if rounds <= 10 { // deletes what was seen and what was not, adds more
			must(t, dir.Unlink(fmt.Sprintf("old-%04d", rounds)))
			must(t, dir.Unlink(fmt.Sprintf("old-%04d", 999-rounds)))
			f, err := dir.Create(fmt.Sprintf("new-%d", rounds), New{})
			must(t, err)
			f.DecRef()
		}
	}
	for n := 20; n < 980; n++ {
		if name := fmt.Sprintf("old-%04d", n); seen[name] != 1 {
			t.Errorf("%s seen %d times", name, seen[name])
		}
	}
	dir.DecRef()
	finish(t, fs, img)
}

// TestManySubdirectories: above 65,000 links a directory with an index counts 1.
func TestManySubdirectories(t *testing.T) {
	img := mkfs(t, 128<<20, "-b", "1024", "-O", "metadata_csum,^has_journal", "-N", "1000")
	fs := open(t, img, Options{})
	dir := mkdir(t, fs.Root(), "dir")
	must(t, dir.change(func() { dir.setLinks(MaxLinks) })) // as if there were 64,998
	if _, err := dir.Create("sub", New{Mode: syscall.S_IFDIR}); !errors.Is(err, syscall.EMLINK) {
		t.Errorf("without an index: %v", err)
	}
	for n := range 60 {
		f, err := dir.Create(fmt.Sprintf("file-with-a-name-%d", n), New{})
		must(t, err)
		f.DecRef()
	}
	sub, err := dir.Create("sub", New{Mode: syscall.S_IFDIR})
	must(t, err)
	if n := dir.Attr().Nlink; n != 1 {
		t.Errorf("%d links", n)
	}
	sub.DecRef()
	must(t, dir.Rmdir("sub"))
	if n := dir.Attr().Nlink; n != 1 {
		t.Errorf("%d links after rmdir", n)
	}
	must(t, dir.change(func() { dir.setLinks(2) }))

	f := mkfile(t, dir, "linked", nil)
	must(t, f.change(func() { f.setLinks(MaxLinks) }))
	if err := dir.Link("one too many", f); !errors.Is(err, syscall.EMLINK) {
		t.Errorf("link: %v", err)
	}
	must(t, f.change(func() { f.setLinks(1) }))
	f.DecRef()
	dir.DecRef()
	finish(t, fs, img)
}

func TestNames(t *testing.T) {
	img := mkfsProfile(t, 16<<20)
	fs := open(t, img, Options{})
	r := fs.Root()
	for _, c := range []struct {
		name string
		want error
	}{
		{strings.Repeat("n", 256), syscall.ENAMETOOLONG}, {strings.Repeat("n", 255), nil}, {"", syscall.EINVAL},
		{"a/b", syscall.EINVAL}, {"nul\x00", syscall.EINVAL}, {".", syscall.EEXIST}, {"..", syscall.EEXIST}, {"\xff\xfe", nil},
	} {
		f, err := r.Create(c.name, New{})
		if !errors.Is(err, c.want) {
			t.Errorf("%q: %v, want %v", c.name, err, c.want)
		}
		if err == nil {
			f.DecRef()
		}
	}
	if _, err := r.Create("link", New{Mode: syscall.S_IFLNK, Target: strings.Repeat("t", 4096)}); !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("long target: %v", err)
	}
	f, err := r.Create("link", New{Mode: syscall.S_IFLNK, Target: strings.Repeat("t", 4095)})
	must(t, err)
	f.DecRef()
	finish(t, fs, img)
}
