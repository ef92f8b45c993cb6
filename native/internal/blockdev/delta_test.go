package blockdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gvx.dev/gvx/native/internal/blockdev/deltatest"
)

// deltaSize has three pages of the bitmap and an end that is no block's.
const deltaSize = 2*pageBits*DeltaBlock + 10*DeltaBlock + 1024

// windows are the places that tests write to: the beginning, where the bits go from one sector of a page to the next,
// both sides of a page's end, the end.
var windows = []struct{ off, n int64 }{
	{0, 32 << 10}, {(512-pageHead)*8*DeltaBlock - 16<<10, 32 << 10}, {pageBits*DeltaBlock - 16<<10, 32 << 10}, {deltaSize - 33<<10, 33 << 10},
}

// newBase makes a backing file: noise in the windows, else a hole, and a superblock that is one as far as a delta looks.
func newBase(t testing.TB) (*os.File, *deltaHeader) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "base"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	noise := rand.NewChaCha8([32]byte{1})
	for _, w := range windows {
		p := make([]byte, w.n)
		noise.Read(p)
		if _, err := f.WriteAt(p, w.off); err != nil {
			t.Fatal(err)
		}
	}
	super := make([]byte, superSize)
	binary.LittleEndian.PutUint16(super[56:], superMagic)
	copy(super[104:], "sixteen bytes...")
	if _, err := f.WriteAt(super, superOffset); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != deltaSize {
		t.Fatal(st.Size, err)
	}
	h, err := readDeltaHeader(int(newDeltaFile(t, f).Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return f, h
}

func newDeltaFile(t testing.TB, base *os.File) *os.File {
	t.Helper()
	f, err := os.OpenFile(deltatest.New(t, base.Name()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func openDelta(t testing.TB, f, base *os.File, o DeltaOptions) *Delta {
	t.Helper()
	d, err := NewDelta(int(f.Fd()), int(base.Fd()), o)
	if err != nil {
		t.Fatal(err)
	}
	d.disk = noSync{d.disk}
	return d
}

// noSync saves the time where durability is not what is tested.
type noSync struct{ disk }

func (noSync) Flush() error { return nil }

// model is what the windows hold.
type model [][]byte

func newModel(t testing.TB, r io.ReaderAt) model {
	t.Helper()
	var m model
	for _, w := range windows {
		p := make([]byte, w.n)
		if _, err := r.ReadAt(p, w.off); err != nil {
			t.Fatal(err)
		}
		m = append(m, p)
	}
	return m
}

func (m model) clone() model {
	var out model
	for _, p := range m {
		out = append(out, bytes.Clone(p))
	}
	return out
}

func (m model) compare(t testing.TB, r io.ReaderAt) {
	t.Helper()
	for i, p := range newModel(t, r) {
		if !bytes.Equal(p, m[i]) {
			for at := range p {
				if p[at] != m[i][at] {
					t.Fatalf("window %d differs from byte %d on", i, at)
				}
			}
		}
	}
}

// step does something at random to the device and the model, and returns what.
func step(t testing.TB, r *rand.Rand, d *Delta, m model) string {
	t.Helper()
	i := r.IntN(len(windows))
	at := r.Int64N(windows[i].n)
	n := 1 + r.Int64N(min(windows[i].n-at, 1+r.Int64N(20<<10)))
	if r.IntN(2) == 0 { // whole sectors, as a file system does
		at, n = at&^511, max(512, n&^511)
		n = min(n, windows[i].n-at)
	}
	off, piece := windows[i].off+at, m[i][at:at+n]
	switch k := r.IntN(10); {
	case k < 3:
		for j := range piece {
			piece[j] = byte(r.Uint32())
		}
		if _, err := d.WriteWith(off, n, func() error {
			_, err := d.disk.WriteAt(piece, off)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("write %d at %d into the file", n, off)
	case k < 6:
		for j := range piece {
			piece[j] = byte(r.Uint32())
		}
		if _, err := d.WriteAt(piece, off); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("write %d at %d", n, off)
	case k < 8:
		if err := d.Discard(off, n); err != nil {
			t.Fatal(err)
		}
		clear(piece)
		return fmt.Sprintf("discard %d at %d", n, off)
	case k < 9:
		if err := d.CopyUp(off, n); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("copy up %d at %d", n, off)
	default:
		p := make([]byte, n)
		if _, err := d.ReadAt(p, off); err != nil || !bytes.Equal(p, piece) {
			t.Fatalf("read of %d at %d: %v", n, off, err)
		}
		return "read"
	}
}

func seeded(n uint64) *rand.Rand { return rand.New(rand.NewPCG(n, 7)) }

func TestDeltaAgainstModel(t *testing.T) {
	for _, eager := range []bool{false, true} {
		t.Run(fmt.Sprintf("eager=%v", eager), func(t *testing.T) {
			base, _ := newBase(t)
			before := newModel(t, base)
			for seed := range uint64(8) {
				r := seeded(seed)
				f := newDeltaFile(t, base)
				m := before.clone()
				d := openDelta(t, f, base, DeltaOptions{Eager: eager})
				for range 200 {
					step(t, r, d, m)
					if r.IntN(40) == 0 {
						if err := d.Flush(); err != nil {
							t.Fatal(err)
						}
						d = openDelta(t, f, base, DeltaOptions{Eager: eager})
					}
				}
				m.compare(t, d)
				if err := d.Flush(); err != nil {
					t.Fatal(err)
				}
				m.compare(t, openDelta(t, f, base, DeltaOptions{ReadOnly: true}))
			}
			before.compare(t, base)
		})
	}
}

// TestEagerNeedsNoFlush: with Eager, what was written is there when the process is gone.
func TestEagerNeedsNoFlush(t *testing.T) {
	base, _ := newBase(t)
	f, m := newDeltaFile(t, base), newModel(t, base)
	r := seeded(1)
	for range 100 {
		d := openDelta(t, f, base, DeltaOptions{Eager: true})
		step(t, r, d, m)
		m.compare(t, openDelta(t, f, base, DeltaOptions{}))
	}
}

// op is a write (or, without data, a hole) that was not flushed yet.
type op struct {
	off  int64
	n    int64
	data []byte
}

// cutDisk is a file that remembers what was not flushed; stable is what the disk has.
type cutDisk struct {
	file
	stable  *os.File
	pending []op
	left    int // operations until the host is lost
	lose    func()
}

// lost counts an operation, and tells whether the host is gone.
func (c *cutDisk) lost() bool {
	if c.left--; c.left == 0 {
		c.lose()
	}
	return c.left <= 0
}

// WriteAt remembers whole sectors: that is how they go to a disk from a page cache.
func (c *cutDisk) WriteAt(p []byte, off int64) (int, error) {
	n, err := c.file.WriteAt(p, off)
	if err != nil || c.lost() {
		return n, err
	}
	start := off &^ 511
	whole := make([]byte, min(c.size, (off+int64(len(p))+511)&^511)-start)
	if _, err := c.ReadAt(whole, start); err != nil {
		return n, err
	}
	c.pending = append(c.pending, op{start, int64(len(whole)), whole})
	return n, nil
}

func (c *cutDisk) Discard(off, n int64) error {
	if !c.lost() {
		c.pending = append(c.pending, op{off: off, n: n})
	}
	return c.file.Discard(off, n)
}

func (c *cutDisk) Flush() error {
	if c.lost() {
		return nil
	}
	for _, o := range c.pending {
		o.apply(c.stable)
	}
	c.pending = nil
	return nil
}

func (o op) apply(f *os.File) {
	if o.data == nil {
		if err := (&file{fd: int(f.Fd()), size: 1 << 62}).Discard(o.off, o.n); err != nil {
			panic(err)
		}
	} else if _, err := f.WriteAt(o.data, o.off); err != nil {
		panic(err)
	}
}

// crash lets the unflushed reach the disk in part: each lost, kept, or torn between sectors.
func (c *cutDisk) crash(r *rand.Rand) {
	for _, o := range c.pending {
		switch r.IntN(3) {
		case 0:
		case 1:
			o.apply(c.stable)
		default:
			for at := int64(0); at < o.n; at += 512 {
				if r.IntN(2) == 0 {
					part := op{off: o.off + at, n: min(512, o.n-at)}
					if o.data != nil {
						part.data = o.data[at : at+part.n]
					}
					part.apply(c.stable)
				}
			}
		}
	}
}

// TestDeltaCut: whatever the host loses or tears of what was not flushed, every sector is as it was at the last
// flush or as some write since has left it.
func TestDeltaCut(t *testing.T) {
	base, h := newBase(t)
	for seed := range uint64(160) {
		r := seeded(seed)
		eager := seed%2 == 1
		f, stable := newDeltaFile(t, base), newDeltaFile(t, base)
		c := &cutDisk{file: file{fd: int(f.Fd()), size: deltaFileSize(h.size)}, stable: stable, left: 1 + r.IntN(80)}
		c.lose = func() { c.crash(r) }
		below := file{fd: int(base.Fd()), readOnly: true, size: h.baseSize}
		d, err := newDelta(c, int(f.Fd()), below, h, DeltaOptions{Eager: eager})
		if err != nil {
			t.Fatal(err)
		}
		m := newModel(t, d)
		allowed := []model{m.clone()}
		flushed := map[int64]bool{} // blocks present at the last flush
		for c.left > 0 {
			step(t, r, d, m)
			allowed = append(allowed, m.clone())
			if r.IntN(8) == 0 {
				if err := d.Flush(); err != nil {
					t.Fatal(err)
				}
				if c.left <= 0 {
					break
				}
				allowed = []model{m.clone()}
				for _, w := range windows {
					for block := w.off / DeltaBlock; block*DeltaBlock < w.off+w.n; block++ {
						flushed[block], _ = d.Present(block*DeltaBlock, 1)
					}
				}
			}
		}
		after, err := newDelta(&file{fd: int(stable.Fd()), size: deltaFileSize(h.size)}, int(stable.Fd()), below, h, DeltaOptions{})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for i, p := range newModel(t, after) {
			for at := 0; at < len(p); at += 512 {
				end := min(at+512, len(p))
				ok := false
				for _, a := range allowed {
					ok = ok || bytes.Equal(p[at:end], a[i][at:end])
				}
				// Durability process promises nothing about a block that was absent at the last flush, should the host go.
				ok = ok || eager && !flushed[(windows[i].off+int64(at))/DeltaBlock]
				if !ok {
					t.Fatalf("seed %d: window %d, byte %d is neither old nor new", seed, i, at)
				}
			}
		}
	}
}

// TestDeltaKilled: a process that is killed between any two of its writes leaves what was flushed, and with Eager
// what was written.
func TestDeltaKilled(t *testing.T) {
	base, h := newBase(t)
	for seed := range uint64(30) {
		r := seeded(seed)
		f := newDeltaFile(t, base)
		k := &killDisk{file: file{fd: int(f.Fd()), size: deltaFileSize(h.size)}, left: 1 + r.IntN(60)}
		below := file{fd: int(base.Fd()), readOnly: true, size: h.baseSize}
		d, err := newDelta(k, int(f.Fd()), below, h, DeltaOptions{Eager: true})
		if err != nil {
			t.Fatal(err)
		}
		m := newModel(t, d)
		before := m.clone()
		for k.left > 0 {
			before = m.clone()
			step(t, r, d, m)
		}
		after, err := newDelta(&file{fd: int(f.Fd()), size: deltaFileSize(h.size)}, int(f.Fd()), below, h, DeltaOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range newModel(t, after) {
			for at := range p {
				if p[at] != m[i][at] && p[at] != before[i][at] {
					t.Fatalf("seed %d: window %d, byte %d is neither old nor new", seed, i, at)
				}
			}
		}
	}
}

// killDisk does nothing more once left is 0.
type killDisk struct {
	file
	left int
}

func (k *killDisk) WriteAt(p []byte, off int64) (int, error) {
	if k.left--; k.left < 0 {
		return len(p), nil
	}
	return k.file.WriteAt(p, off)
}

func (k *killDisk) Discard(off, n int64) error {
	if k.left--; k.left < 0 {
		return nil
	}
	return k.file.Discard(off, n)
}

// TestDeltaConcurrent: writers of neighbouring sectors never lose each other's bytes (run with -race).
func TestDeltaConcurrent(t *testing.T) {
	for _, eager := range []bool{false, true} {
		base, _ := newBase(t)
		d := openDelta(t, newDeltaFile(t, base), base, DeltaOptions{Eager: eager})
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				p := bytes.Repeat([]byte{byte(g + 1)}, 512)
				for block := range int64(8) {
					if _, err := d.WriteAt(p, block*DeltaBlock+int64(g)*512); err != nil {
						t.Error(err)
					}
					if g == 0 {
						if err := d.Flush(); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		p := make([]byte, 8*DeltaBlock)
		if _, err := d.ReadAt(p, 0); err != nil {
			t.Fatal(err)
		}
		for i, b := range p {
			if b != byte(i/512%8+1) {
				t.Fatalf("byte %d is %d", i, b)
			}
		}
	}
}

func TestDeltaRefusals(t *testing.T) {
	base, h := newBase(t)
	f := newDeltaFile(t, base)
	fd, baseFD := int(f.Fd()), int(base.Fd())
	if is, err := IsDelta(fd); !is || err != nil {
		t.Fatal(is, err)
	}
	if is, err := IsDelta(baseFD); is || err != nil {
		t.Fatal(is, err)
	}
	if _, err := NewDelta(baseFD, fd, DeltaOptions{}); !errors.Is(err, ErrDelta) {
		t.Errorf("a plain file as a delta: %v", err)
	}
	if _, err := NewDelta(fd, fd, DeltaOptions{}); !errors.Is(err, ErrBacking) {
		t.Errorf("a delta over itself: %v", err)
	}
	d := openDelta(t, f, base, DeltaOptions{ReadOnly: true})
	if _, err := d.WriteAt([]byte{1}, 0); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only delta: %v", err)
	}
	if err := errors.Join(d.CopyUp(0, 1)); !errors.Is(err, syscall.EROFS) {
		t.Errorf("copy-up in a read-only delta: %v", err)
	}
	for _, off := range []int64{-1, deltaSize - 5, deltaSize, 1 << 62} {
		if _, err := d.ReadAt(make([]byte, 10), off); !errors.Is(err, syscall.EIO) {
			t.Errorf("read at %d: %v", off, err)
		}
	}
	// The base changes by a byte of its superblock, by its time, by its length.
	var times [2]unix.Timespec
	times[0], times[1] = unix.NsecToTimespec(h.baseMtimeNs), unix.NsecToTimespec(h.baseMtimeNs)
	change := func(what string, change func() error) {
		t.Helper()
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if _, err := NewDelta(fd, baseFD, DeltaOptions{}); !errors.Is(err, ErrBacking) {
			t.Errorf("%s: %v", what, err)
		}
	}
	reset := func() error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, base.Name(), times[:], 0)
	}
	change("time", func() error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, base.Name(), []unix.Timespec{times[0], unix.NsecToTimespec(h.baseMtimeNs + 1)}, 0)
	})
	change("superblock", func() error {
		_, err := base.WriteAt([]byte{1}, superOffset+48)
		return errors.Join(err, reset())
	})
	change("length", func() error {
		_, err := base.WriteAt([]byte{0}, superOffset+48)
		return errors.Join(err, base.Truncate(deltaSize+1), reset())
	})
	if err := errors.Join(base.Truncate(deltaSize), reset()); err != nil {
		t.Fatal(err)
	}
	openDelta(t, f, base, DeltaOptions{})
}

// TestGuestCannotForge: a plain image whose last blocks look like a delta's headers is a plain image, since its
// superblock says that they belong to the volume.
func TestGuestCannotForge(t *testing.T) {
	base, h := newBase(t)
	f := newDeltaFile(t, base)
	length := deltaFileSize(h.size)
	super := make([]byte, superSize)
	binary.LittleEndian.PutUint16(super[56:], superMagic)
	binary.LittleEndian.PutUint32(super[24:], 2)
	binary.LittleEndian.PutUint32(super[4:], uint32(length/4096))
	if _, err := f.WriteAt(super, superOffset); err != nil {
		t.Fatal(err)
	}
	if is, err := IsDelta(int(f.Fd())); is || err != nil {
		t.Error(is, err)
	}
	binary.LittleEndian.PutUint32(super[4:], uint32(length/4096)-2) // it ends where they begin
	if _, err := f.WriteAt(super, superOffset); err != nil {
		t.Fatal(err)
	}
	if is, err := IsDelta(int(f.Fd())); !is || err != nil {
		t.Error(is, err)
	}
}

func TestDamagedTrailer(t *testing.T) {
	base, h := newBase(t)
	f := newDeltaFile(t, base)
	d := openDelta(t, f, base, DeltaOptions{})
	one := bytes.Repeat([]byte{1}, DeltaBlock)
	write := func(block int64) {
		t.Helper()
		if _, err := d.WriteAt(one, block*DeltaBlock); err != nil {
			t.Fatal(err)
		}
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	flip := func(off int64) {
		t.Helper()
		p := make([]byte, 1)
		if _, err := f.ReadAt(p, off); err != nil {
			t.Fatal(err)
		}
		p[0] ^= 0x10
		if _, err := f.WriteAt(p, off); err != nil {
			t.Fatal(err)
		}
	}
	write(2)
	write(3) // in the other place
	places := alignUp(h.size)
	flip(places + DeltaBlock + 500)
	d = openDelta(t, f, base, DeltaOptions{})
	if is, n := d.Present(0, 10*DeltaBlock); is || n != 2*DeltaBlock {
		t.Error(is, n)
	}
	if is, n := d.Present(2*DeltaBlock, 10*DeltaBlock); !is || n != DeltaBlock {
		t.Error("block 3 went with its page, block 2 stayed:", is, n)
	}
	flip(places + 5)
	if _, err := NewDelta(int(f.Fd()), int(base.Fd()), DeltaOptions{}); !errors.Is(err, ErrDelta) {
		t.Errorf("both places damaged: %v", err)
	}
	flip(places + 5)
	header := deltaFileSize(h.size) - 2*DeltaBlock
	flip(header + 100)
	if _, err := NewDelta(int(f.Fd()), int(base.Fd()), DeltaOptions{}); !errors.Is(err, ErrDelta) {
		t.Errorf("the only header damaged: %v", err)
	}
}

func BenchmarkDeltaRead(b *testing.B) {
	base, _ := newBase(b)
	d := openDelta(b, newDeltaFile(b, base), base, DeltaOptions{})
	plain, err := NewFile(int(base.Fd()), true)
	if err != nil {
		b.Fatal(err)
	}
	for _, dev := range []struct {
		name string
		Device
	}{{"plain", plain}, {"delta", d}} {
		for _, n := range []int{4 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s-%d", dev.name, n), func(b *testing.B) {
				p := make([]byte, n)
				b.SetBytes(int64(n))
				for b.Loop() {
					if _, err := dev.ReadAt(p, 8<<20); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
