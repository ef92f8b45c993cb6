// Package blockdev presents a volume file as a flat array of bytes.
//
// Everything above it (ext4, jbd2) sees only the Device interface; layered
// devices (a sparse delta over a golden image) belong here too. It uses only
// system calls that the Sentry's seccomp filter lets through on host files:
// pread64, pwrite64, fdatasync and fallocate.
package blockdev

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"golang.org/x/sys/unix"
)

// Device is a byte-addressed volume of fixed size. Its methods may be called
// from many goroutines at once.
type Device interface {
	// ReadAt fills p from off. A read that cannot be satisfied whole is an error.
	ReadAt(p []byte, off int64) (int, error)
	// WriteAt stores p at off; EROFS on a read-only device.
	WriteAt(p []byte, off int64) (int, error)
	// Size is the length in bytes; it never changes.
	Size() int64
	// Flush returns when everything written so far is on stable storage.
	Flush() error
	// Discard makes [off, off+n) read as zeros, freeing host space when it can.
	// EOPNOTSUPP when the host cannot punch holes; the contents are then as before.
	Discard(off, n int64) error
	// FD is a host descriptor whose page cache holds the device's bytes at the same
	// offsets, so that ranges of it can be mapped; -1 when there is none.
	FD() int
}

// file is a Device on one host file.
type file struct {
	fd       int
	readOnly bool
	size     int64
}

// NewFile makes a Device of an open host file (a regular file or a block
// device). The descriptor stays the caller's: it is never closed here.
func NewFile(fd int, readOnly bool) (Device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("blockdev: stat of descriptor %d: %w", fd, err)
	}
	size := st.Size
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFBLK:
		end, err := unix.Seek(fd, 0, io.SeekEnd)
		if err != nil {
			return nil, fmt.Errorf("blockdev: size of descriptor %d: %w", fd, err)
		}
		size = end
	default:
		return nil, fmt.Errorf("blockdev: descriptor %d is neither a file nor a block device: %w", fd, syscall.ENOTBLK)
	}
	return &file{fd: fd, readOnly: readOnly, size: size}, nil
}

func (f *file) Size() int64 { return f.size }

func (f *file) FD() int { return f.fd }

// inside tells whether [off, off+n) lies within the device.
func (f *file) inside(off, n int64) bool {
	return off >= 0 && n >= 0 && off <= f.size && n <= f.size-off
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if !f.inside(off, int64(len(p))) {
		return 0, fmt.Errorf("blockdev: read of %d bytes at %d is outside the device of %d: %w", len(p), off, f.size, syscall.EIO)
	}
	done := 0
	for done < len(p) {
		n, err := unix.Pread(f.fd, p[done:], off+int64(done))
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return done, fmt.Errorf("blockdev: read at %d: %w", off+int64(done), err)
		}
		if n == 0 {
			return done, fmt.Errorf("blockdev: file ends at %d, it was %d bytes long: %w", off+int64(done), f.size, syscall.EIO)
		}
		done += n
	}
	return done, nil
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if f.readOnly {
		return 0, syscall.EROFS
	}
	if !f.inside(off, int64(len(p))) {
		return 0, fmt.Errorf("blockdev: write of %d bytes at %d is outside the device of %d: %w", len(p), off, f.size, syscall.EIO)
	}
	done := 0
	for done < len(p) {
		n, err := unix.Pwrite(f.fd, p[done:], off+int64(done))
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return done, fmt.Errorf("blockdev: write at %d: %w", off+int64(done), err)
		}
		if n == 0 {
			return done, fmt.Errorf("blockdev: write at %d made no progress: %w", off+int64(done), syscall.EIO)
		}
		done += n
	}
	return done, nil
}

func (f *file) Flush() error {
	if f.readOnly {
		return nil
	}
	for {
		err := unix.Fdatasync(f.fd)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("blockdev: fdatasync: %w", err)
		}
		return nil
	}
}

func (f *file) Discard(off, n int64) error {
	if f.readOnly {
		return syscall.EROFS
	}
	if !f.inside(off, n) {
		return fmt.Errorf("blockdev: discard of %d bytes at %d is outside the device of %d: %w", n, off, f.size, syscall.EIO)
	}
	if n == 0 {
		return nil
	}
	for {
		err := unix.Fallocate(f.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("blockdev: punch hole of %d bytes at %d: %w", n, off, err)
		}
		return nil
	}
}
