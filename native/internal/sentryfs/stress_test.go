package sentryfs

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/safemem"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"
)

// addressSpace behaves as mm.MemoryManager does: translations are used below a lock that Invalidate takes for writing.
type addressSpace struct {
	active sync.RWMutex
	base   hostarch.Addr
	// cached are translations in use, by page of the file; below active.
	mu     sync.Mutex
	cached map[uint64]memmap.Translation
}

func (s *addressSpace) Invalidate(ar hostarch.AddrRange, _ memmap.InvalidateOpts) {
	s.active.Lock()
	defer s.active.Unlock()
	for page, tr := range s.cached {
		if a := s.base + hostarch.Addr(page); a >= ar.Start && a < ar.End {
			tr.File.DecRef(memmap.FileRange{Start: tr.Offset, End: tr.Offset + hostarch.PageSize})
			delete(s.cached, page)
		}
	}
}

// access calls fn with the bytes of a page, or returns the error of the fault.
func (s *addressSpace) access(e *env, m memmap.Mappable, page uint64, at hostarch.AccessType, fn func(safemem.Block)) error {
	s.active.RLock()
	defer s.active.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	tr, ok := s.cached[page]
	if !ok {
		mr := memmap.MappableRange{Start: page, End: page + hostarch.PageSize}
		ts, err := m.Translate(e.ctx, mr, mr, at)
		if err != nil {
			return err
		}
		tr = ts[0]
		tr.File.IncRef(tr.FileRange(), 0)
		s.cached[page] = tr
	}
	bs, err := tr.File.MapInternal(tr.FileRange(), hostarch.ReadWrite)
	if err != nil {
		return err
	}
	fn(bs.Head())
	return nil
}

// Everything at once on few names: no byte of one file shows in another, whatever is truncated, removed, mapped, renamed or
// read meanwhile, and the volume is whole afterwards. Each file holds only its own letter and zeros.
func TestConcurrentUse(t *testing.T) {
	e := newEnv(t)
	const files, workers = 6, 8
	e.ok(e.mkdir("/d", 0o755))
	e.ok(e.mkdir("/other", 0o755))
	check := func(what string, letter byte, p []byte) {
		for i, b := range p {
			if b != 0 && b != letter {
				t.Errorf("%s: byte %d of file %q is %q", what, i, letter, b)
				return
			}
		}
	}
	deadline := time.Now().Add(3 * time.Second)
	if testing.Short() {
		deadline = time.Now().Add(500 * time.Millisecond)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 7))
			buf := make([]byte, 200000)
			for time.Now().Before(deadline) && !t.Failed() {
				f := r.IntN(files)
				letter := byte('a' + f)
				path := fmt.Sprintf("/d/%c", letter)
				switch r.IntN(12) {
				case 0:
					e.unlink(path) //nolint:errcheck // may be gone
					continue
				case 1:
					e.setstat(path, linux.Statx{Mask: linux.STATX_SIZE, Size: uint64(r.IntN(300000))}, true) //nolint:errcheck
					continue
				case 2:
					e.rename(path, fmt.Sprintf("/other/%c", letter), 0) //nolint:errcheck
					e.rename(fmt.Sprintf("/other/%c", letter), path, 0) //nolint:errcheck
					continue
				case 3:
					name := fmt.Sprintf("/other/%d", r.IntN(20))
					if err := e.mkdir(name, 0o700); err != nil {
						e.rmdir(name) //nolint:errcheck
					}
					continue
				case 4:
					fd, err := e.open("/d", linux.O_RDONLY|linux.O_DIRECTORY, 0)
					if err != nil {
						t.Error(err)
						return
					}
					if err := fd.IterDirents(e.ctx, &dirents{}); err != nil {
						t.Error(err)
					}
					fd.DecRef(e.ctx)
					continue
				}
				fd, err := e.open(path, linux.O_RDWR|linux.O_CREAT, 0o600)
				if err != nil {
					t.Errorf("open: %v", err)
					return
				}
				off := r.IntN(300000)
				n := 1 + r.IntN(len(buf)-1)
				switch r.IntN(5) {
				case 0, 1:
					for i := range buf[:n] {
						buf[i] = letter
					}
					if _, err := fd.PWrite(e.ctx, usermem.BytesIOSequence(buf[:n]), int64(off), vfs.WriteOptions{}); err != nil {
						t.Errorf("write: %v", err)
					}
				case 2:
					got, _ := fd.PRead(e.ctx, usermem.BytesIOSequence(buf[:n]), int64(off), vfs.ReadOptions{})
					check("read", letter, buf[:got])
				case 3:
					fd.Allocate(e.ctx, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, uint64(off), uint64(n)) //nolint:errcheck
				case 4:
					e.useMapping(fd, r, letter, check)
				}
				fd.DecRef(e.ctx)
			}
		})
	}
	wg.Wait()
	for i := range files {
		path := fmt.Sprintf("/d/%c", 'a'+i)
		if fd, err := e.open(path, linux.O_RDONLY, 0); err == nil {
			check("at the end", byte('a'+i), e.pread(fd, 1<<20, 0))
			fd.DecRef(e.ctx)
		}
	}
}

// useMapping maps fd for a moment, in a space of its own, and reads and writes some pages.
func (e *env) useMapping(fd *vfs.FileDescription, r *rand.Rand, letter byte, check func(string, byte, []byte)) {
	var opts memmap.MMapOpts
	if err := fd.ConfigureMMap(e.ctx, &opts); err != nil {
		e.t.Error(err)
		return
	}
	defer opts.MappingIdentity.DecRef(e.ctx)
	s := &addressSpace{base: 1 << 32, cached: make(map[uint64]memmap.Translation)}
	const length = 512 << 10
	ar := hostarch.AddrRange{Start: s.base, End: s.base + length}
	if err := opts.Mappable.AddMapping(e.ctx, s, ar, 0, true); err != nil {
		e.t.Error(err)
		return
	}
	for range 20 {
		page := uint64(r.IntN(length)) &^ (hostarch.PageSize - 1)
		write := r.IntN(2) == 0
		// A fault past the end of file is part of the game.
		s.access(e, opts.Mappable, page, hostarch.ReadWrite, func(b safemem.Block) { //nolint:errcheck
			p := b.ToSlice()
			check("mapping", letter, p[:1])
			if write {
				p[r.IntN(len(p))] = letter
			}
		})
	}
	s.Invalidate(ar, memmap.InvalidateOpts{})
	opts.Mappable.RemoveMapping(e.ctx, s, ar, 0, true)
}
