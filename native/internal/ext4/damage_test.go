package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// memory is a device in memory, which tests damage or make fail.
type memory struct {
	data   []byte
	failAt int // writes until one fails; 0: never
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(m.data)) {
		return 0, syscall.EIO
	}
	return copy(p, m.data[off:]), nil
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if m.failAt > 0 {
		if m.failAt--; m.failAt == 0 {
			m.failAt = 1
			return 0, syscall.EIO
		}
	}
	if off < 0 || off+int64(len(p)) > int64(len(m.data)) {
		return 0, syscall.EIO
	}
	return copy(m.data[off:], p), nil
}

func (m *memory) Size() int64                { return int64(len(m.data)) }
func (m *memory) Flush() error               { return nil }
func (m *memory) Discard(off, n int64) error { clear(m.data[off : off+n]); return nil }
func (m *memory) FD() int                    { return -1 }

// populated gives the bytes of a small volume with some of everything.
func populated(t testing.TB, args ...string) []byte {
	t.Helper()
	img := mkfs(t, 4<<20, append([]string{"-O", "^has_journal", "-N", "512"}, args...)...)
	fs := open(t, img, Options{})
	m := newMachine(t, fs, 7)
	for range 600 {
		m.step()
	}
	dir := mkdir(t, fs.Root(), "indexed")
	for n := range 120 {
		f, err := dir.Create(fmt.Sprintf("%d-%s", n, strings.Repeat("i", 40)), New{})
		must(t, err)
		f.DecRef()
	}
	dir.DecRef()
	f := mkfile(t, fs.Root(), "deep", nil)
	for n := range 200 {
		_, err := f.WriteAt([]byte{1}, int64(n)*2*fs.BlockSize())
		must(t, err)
	}
	f.DecRef()
	finish(t, fs, img)
	data, err := os.ReadFile(img)
	must(t, err)
	return data
}

// exercise does a bit of everything and wants no particular result: only that
// it comes to an end without panicking.
func exercise(dev *memory, o Options, rnd *rand.Rand) {
	fs, err := Open(dev, o)
	if err != nil {
		return
	}
	defer fs.Close()
	left := 4000
	var walk func(d *Inode, depth int)
	walk = func(d *Inode, depth int) {
		var list []string
		if d.ReadDir(0, func(e Dirent) bool { list = append(list, e.Name); return len(list) < 500 }) != nil || depth > 30 {
			return
		}
		for _, name := range list {
			if left--; left < 0 {
				return
			}
			i, err := d.Lookup(name)
			if err != nil {
				continue
			}
			i.Attr()
			_, _ = i.ListXattr()
			_, _ = i.GetXattr("user.a")
			_, _ = i.Readlink()
			if i.isDir() {
				walk(i, depth+1)
				if x, err := i.Create("new", New{}); err == nil {
					x.DecRef()
				}
				_ = i.Unlink("new")
			} else if i.isRegular() {
				p := make([]byte, 5000)
				_, _ = i.ReadAt(p, 0)
				_, _ = i.WriteAt(p, rnd.Int64N(200_000))
				_, _ = i.Extents(0, 100_000, true)
				_ = i.Fallocate(FallocPunchHole|FallocKeepSize, rnd.Int64N(200_000), 30_000)
				_ = i.Truncate(rnd.Int64N(100_000))
			}
			_ = i.SetXattr("trusted.x", make([]byte, 300), 0)
			switch rnd.IntN(4) {
			case 0:
				_ = d.Unlink(name)
				_ = d.Rmdir(name)
			case 1:
				_ = fs.Rename(d, name, fs.Root(), "moved", 0)
			case 2:
				_ = fs.Rename(d, name, fs.Root(), "moved", RenameExchange)
			}
			i.DecRef()
		}
	}
	walk(fs.Root(), 0)
	fs.Check()
	_ = fs.Sync()
}

// TestDamagedVolumes changes metadata at random, with and without checksums to
// tell: nothing may panic or hang.
func TestDamagedVolumes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 2))
	for _, args := range [][]string{
		{"-b", "1024", "-O", "^metadata_csum,^64bit,^uninit_bg"},
		{"-b", "4096", "-O", "^metadata_csum"},
		{"-b", "1024", "-O", "metadata_csum"},
	} {
		good := populated(t, args...)
		var used []int // offsets of what is not zero, where metadata mostly is
		for k := 1024; k < len(good); k += 4 {
			if good[k] != 0 {
				used = append(used, k)
			}
		}
		for range 70 {
			dev := &memory{data: bytes.Clone(good)}
			for range 1 + rnd.IntN(40) {
				k := used[rnd.IntN(len(used))] + rnd.IntN(4)
				switch rnd.IntN(3) {
				case 0:
					dev.data[k] = byte(rnd.Uint32())
				case 1:
					dev.data[k] ^= 1 << rnd.IntN(8)
				case 2:
					copy(dev.data[k&^3:], []byte{0xff, 0xff, 0xff, 0xff})
				}
			}
			exercise(dev, Options{NoDiscard: rnd.IntN(2) == 0}, rnd)
		}
	}
}

// TestDamageIsTold flips one bit of each kind of checksummed block.
func TestDamageIsTold(t *testing.T) {
	good := populated(t, "-b", "1024", "-O", "metadata_csum")
	at := func(fn func(fs *FS) uint64) uint64 {
		fs, err := Open(&memory{data: bytes.Clone(good)}, Options{ReadOnly: true})
		must(t, err)
		return fn(fs)
	}
	file := func(fs *FS, name string) *Inode {
		i, err := lookup(fs, name)
		must(t, err)
		return i
	}
	for _, c := range []struct {
		what  string
		where func(fs *FS) uint64 // byte to flip
		use   func(fs *FS) error
	}{
		{"superblock", func(fs *FS) uint64 { return 1024 + sVolumeName }, nil},
		{"descriptor", func(fs *FS) uint64 { return fs.groups[0].descBlk<<10 + 12 }, nil},
		{"inode", func(fs *FS) uint64 {
			i := file(fs, "deep")
			return i.tblBlk<<10 + uint64(i.tblOff) + offUIDLo
		}, func(fs *FS) error { _, err := lookup(fs, "deep"); return err }},
		{"extent block", func(fs *FS) uint64 {
			_, blk := getIndex(entry(file(fs, "deep").root(), 0))
			return blk<<10 + 20
		}, func(fs *FS) error { _, err := contents(file(fs, "deep")); return err }},
		{"directory leaf", func(fs *FS) uint64 {
			phys, err := file(fs, "indexed").dirPhys(1)
			must(t, err)
			return phys<<10 + 1000
		}, func(fs *FS) error { _, err := file(fs, "indexed").Lookup("x"); return err }},
		{"directory index", func(fs *FS) uint64 {
			phys, err := file(fs, "indexed").dirPhys(0)
			must(t, err)
			return phys<<10 + rootEntriesAt + 8
		}, func(fs *FS) error { _, err := file(fs, "indexed").Lookup("x"); return err }},
		{"block bitmap", func(fs *FS) uint64 { return fs.groups[0].blockBitmap<<10 + 100 },
			func(fs *FS) error { _, err := file(fs, "deep").WriteAt(make([]byte, 9000), 1<<20); return err }},
		{"inode bitmap", func(fs *FS) uint64 { return fs.groups[0].inodeBitmap<<10 + 3 },
			func(fs *FS) error { _, err := fs.Root().Create("new", New{}); return err }},
	} {
		dev := &memory{data: bytes.Clone(good)}
		dev.data[at(c.where)] ^= 4
		fs, err := Open(dev, Options{})
		if c.use == nil {
			if !errors.Is(err, syscall.EUCLEAN) {
				t.Errorf("%s: open: %v", c.what, err)
			}
			continue
		}
		must(t, err)
		if err := c.use(fs); !errors.Is(err, syscall.EUCLEAN) {
			t.Errorf("%s: %v", c.what, err)
		}
		_ = fs.Close()
	}
}

// TestDeviceFails: after a failed write nothing more is written, and Close says so.
func TestDeviceFails(t *testing.T) {
	good := populated(t, "-b", "4096", "-O", "metadata_csum")
	dev := &memory{data: bytes.Clone(good)}
	fs, err := Open(dev, Options{})
	must(t, err)
	mkdir(t, fs.Root(), "before").DecRef()
	dev.failAt = 1
	if err := fs.Sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("sync: %v", err)
	}
	dev.failAt = 0
	if _, err := fs.Root().Create("after", New{}); !errors.Is(err, syscall.EROFS) {
		t.Errorf("create: %v", err)
	}
	if err := fs.Close(); !errors.Is(err, syscall.EIO) {
		t.Errorf("close: %v", err)
	}
	if _, err := Open(dev, Options{}); !errors.Is(err, syscall.EUCLEAN) {
		t.Errorf("open again: %v", err)
	}
}
