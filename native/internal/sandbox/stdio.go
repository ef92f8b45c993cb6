package sandbox

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// stdio is what the guest gets as its standard streams.
//
// The Sentry keeps a file offset of its own for a regular file, from 0. Passed on directly, a log that several commands write to one after
// another (or stdout and stderr of one command) would be overwritten. So a regular file is put behind a pipe, and copied by the
// supervisor through the shared offset. Everything else (pipes, terminals, sockets, devices) is passed as it is.
type stdio struct {
	fds    [3]int
	pipes  []int // our copies of the guest's ends, to close once the Sentry has them
	copies sync.WaitGroup
}

// newStdio looks at descriptors 0, 1 and 2 of this process. A closed one is replaced by /dev/null.
func newStdio(null int) (*stdio, error) {
	s := &stdio{}
	for fd := range 3 {
		s.fds[fd] = fd
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			s.fds[fd] = null
			continue
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if fd == 0 {
			if at, err := unix.Seek(fd, 0, io.SeekCurrent); err == nil && at == 0 {
				continue // What the guest would do anyhow, and it can seek.
			}
		}
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return nil, fmt.Errorf("pipe for the guest's stdio: %w", err)
		}
		if fd == 0 {
			s.fds[fd] = p[0]
			s.pipes = append(s.pipes, p[0])
			// Not waited for: a guest need not read its input to the end.
			go copyStream(os.NewFile(uintptr(p[1]), "stdin pipe"), os.Stdin)
			continue
		}
		s.fds[fd] = p[1]
		s.pipes = append(s.pipes, p[1])
		s.copies.Add(1)
		go func() {
			defer s.copies.Done()
			copyStream([]*os.File{nil, os.Stdout, os.Stderr}[fd], os.NewFile(uintptr(p[0]), "stdio pipe"))
		}()
	}
	return s, nil
}

// copyStream copies until the source ends. An error of the destination (a full disk) ends it too: the guest gets EPIPE.
func copyStream(dst, src *os.File) {
	_, _ = io.Copy(struct{ io.Writer }{dst}, struct{ io.Reader }{src})
	if dst.Fd() > 2 {
		_ = dst.Close()
	}
	if src.Fd() > 2 {
		_ = src.Close()
	}
}

// handedOver closes our copies of the guest's ends.
func (s *stdio) handedOver() {
	for _, fd := range s.pipes {
		_ = unix.Close(fd)
	}
	s.pipes = nil
}

// drain waits until everything the guest wrote is where it belongs. The Sentry must be gone.
func (s *stdio) drain() {
	if s != nil {
		s.copies.Wait()
	}
}
