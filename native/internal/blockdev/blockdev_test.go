package blockdev

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func image(t *testing.T, size int) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(bytes.Repeat([]byte{7}, size)); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestReadAndWrite(t *testing.T) {
	f := image(t, 1<<20)
	d, err := NewFile(int(f.Fd()), false)
	if err != nil {
		t.Fatal(err)
	}
	if d.Size() != 1<<20 || d.FD() != int(f.Fd()) {
		t.Errorf("size %d, descriptor %d", d.Size(), d.FD())
	}
	if n, err := d.WriteAt([]byte("end"), 1<<20-3); n != 3 || err != nil {
		t.Errorf("write: %d, %v", n, err)
	}
	p := make([]byte, 4)
	if n, err := d.ReadAt(p, 1<<20-4); n != 4 || err != nil || string(p) != "\x07end" {
		t.Errorf("read: %d, %v, %q", n, err, p)
	}
	if err := d.Flush(); err != nil {
		t.Error(err)
	}
}

func TestNothingOutside(t *testing.T) {
	d, err := NewFile(int(image(t, 4096).Fd()), false)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 10)
	for _, off := range []int64{-1, 4087, 4096, 1 << 62} {
		if _, err := d.ReadAt(p, off); !errors.Is(err, syscall.EIO) {
			t.Errorf("read at %d: %v", off, err)
		}
		if _, err := d.WriteAt(p, off); !errors.Is(err, syscall.EIO) {
			t.Errorf("write at %d: %v", off, err)
		}
		if err := d.Discard(off, 10); !errors.Is(err, syscall.EIO) {
			t.Errorf("discard at %d: %v", off, err)
		}
	}
}

func TestReadOnly(t *testing.T) {
	d, err := NewFile(int(image(t, 4096).Fd()), true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.WriteAt([]byte{1}, 0); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write: %v", err)
	}
	if err := d.Discard(0, 1); !errors.Is(err, syscall.EROFS) {
		t.Errorf("discard: %v", err)
	}
}

// TestDiscardFreesSpace: what is discarded reads as zeros and is a hole.
func TestDiscardFreesSpace(t *testing.T) {
	f := image(t, 1<<20)
	d, err := NewFile(int(f.Fd()), false)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Discard(4096, 512<<10); errors.Is(err, syscall.EOPNOTSUPP) {
		t.Skip("this file system punches no holes")
	} else if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 1<<20)
	if _, err := d.ReadAt(p, 0); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{7}, 1<<20)
	clear(want[4096 : 4096+512<<10])
	if !bytes.Equal(p, want) {
		t.Error("contents")
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Blocks*512 > 600<<10 {
		t.Errorf("%d bytes are still allocated (%v)", st.Blocks*512, err)
	}
}

// TestShortenedFile: a file that lost its end under us is an error, not zeros.
func TestShortenedFile(t *testing.T) {
	f := image(t, 8192)
	d, err := NewFile(int(f.Fd()), false)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	if n, err := d.ReadAt(make([]byte, 8192), 0); n != 4096 || !errors.Is(err, syscall.EIO) {
		t.Errorf("%d, %v", n, err)
	}
}

func TestNotADevice(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := NewFile(int(r.Fd()), true); !errors.Is(err, syscall.ENOTBLK) {
		t.Errorf("pipe: %v", err)
	}
}
