package sentryfs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/blockdev/deltatest"
)

// newLayeredEnv mounts an empty delta over a volume that fill has filled. When the test ends e2fsck judges the volume, and
// the backing file must be as it was.
func newLayeredEnv(t *testing.T, fill func(e *env)) *env {
	t.Helper()
	below := newEnv(t)
	fill(below)
	below.close()
	before, err := os.ReadFile(below.image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if after, err := os.ReadFile(below.image); err != nil || !bytes.Equal(after, before) {
			t.Errorf("the backing file was written to (%v)", err)
		}
	})
	delta := deltatest.New(t, below.image)
	e := openEnvOn(t, delta, below.image)
	t.Cleanup(func() {
		e.close()
		// e2fsck knows no deltas: it gets what a delta device shows.
		plain := filepath.Join(t.TempDir(), "plain")
		flat, err := os.Create(plain)
		if err != nil {
			t.Fatal(err)
		}
		defer flat.Close()
		if _, err := io.Copy(flat, io.NewSectionReader(reopen(t, delta, below.image), 0, int64(len(before)))); err != nil {
			t.Fatal(err)
		}
		e.image = plain
		e.fsck()
	})
	return e
}

func reopen(t *testing.T, delta, base string) *blockdev.Delta {
	t.Helper()
	f, err := os.OpenFile(delta, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close(); b.Close() })
	d, err := blockdev.NewDelta(int(f.Fd()), int(b.Fd()), blockdev.DeltaOptions{Eager: true})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// watched is an address space that keeps translations as mm.MemoryManager does, with their permissions.
type watched struct {
	active sync.Mutex
	cached map[uint64]memmap.Translation
}

func (s *watched) Invalidate(ar hostarch.AddrRange, _ memmap.InvalidateOpts) {
	s.active.Lock()
	defer s.active.Unlock()
	for page, tr := range s.cached {
		if ar.Contains(hostarch.Addr(page)) {
			tr.File.DecRef(memmap.FileRange{Start: tr.Offset, End: tr.Offset + hostarch.PageSize})
			delete(s.cached, page)
		}
	}
}

// page calls fn with the bytes of a page that is mapped at its offset; false where it is past the end.
func (s *watched) page(e *env, m memmap.Mappable, page uint64, at hostarch.AccessType, fn func([]byte)) bool {
	e.t.Helper()
	s.active.Lock()
	defer s.active.Unlock()
	tr, ok := s.cached[page]
	if !ok || !tr.Perms.SupersetOf(at) {
		if ok {
			tr.File.DecRef(tr.FileRange())
			delete(s.cached, page)
		}
		mr := memmap.MappableRange{Start: page, End: page + hostarch.PageSize}
		ts, err := m.Translate(e.ctx, mr, mr, at)
		if cerr := memmap.CheckTranslateResult(mr, mr, at, ts, err); cerr != nil {
			e.t.Errorf("Translate(%v): %v", mr, cerr)
		}
		if err != nil {
			return false
		}
		tr = ts[0]
		tr.File.IncRef(tr.FileRange(), 0)
		s.cached[page] = tr
	}
	bs, err := tr.File.MapInternal(tr.FileRange(), at)
	if err != nil {
		e.t.Errorf("page %#x: %v", page, err)
		return false
	}
	fn(bs.Head().ToSlice())
	return true
}

// mapIt maps a file from its beginning.
func (e *env) mapIt(fd *vfs.FileDescription, length uint64, writable bool) (memmap.Mappable, *watched) {
	e.t.Helper()
	var opts memmap.MMapOpts
	e.ok(fd.ConfigureMMap(e.ctx, &opts))
	s := &watched{cached: make(map[uint64]memmap.Translation)}
	ar := hostarch.AddrRange{Start: 0, End: hostarch.Addr(length)}
	e.ok(opts.Mappable.AddMapping(e.ctx, s, ar, 0, writable))
	e.t.Cleanup(func() {
		s.Invalidate(ar, memmap.InvalidateOpts{})
		opts.Mappable.RemoveMapping(e.ctx, s, ar, 0, writable)
		opts.MappingIdentity.DecRef(e.ctx)
		fd.DecRef(e.ctx)
	})
	return opts.Mappable, s
}

// A file of the backing file is mapped from there, and nothing is copied until somebody writes.
func TestLayeredMappings(t *testing.T) {
	data := pattern(64<<10, 3)
	e := newLayeredEnv(t, func(e *env) { e.put("/f", data) })
	m, s := e.mapIt(e.mustOpen("/f", linux.O_RDWR, 0), 64<<10, false)
	i := m.(*inode)
	from := func(page uint64, at hostarch.AccessType) memmap.File {
		t.Helper()
		if !s.page(e, m, page, at, func([]byte) {}) {
			t.Fatal("a fault")
		}
		return s.cached[page].File
	}
	if from(0, hostarch.Read) != &i.fs.baseMF || from(4096, hostarch.Read) != &i.fs.baseMF {
		t.Error("not mapped from the backing file")
	}
	e.pwrite(s.fdOf(e, "/f"), []byte("x"), 100)
	if _, ok := s.cached[0]; ok {
		t.Error("the translation of a page that was written to stays")
	}
	if from(0, hostarch.Read) != &i.fs.mf || from(4096, hostarch.Read) != &i.fs.baseMF {
		t.Error("one page was written to, and not just that one is the volume's own")
	}
	// A shared writable mapping takes what it touches out of the backing file.
	w, ws := e.mapIt(e.mustOpen("/f", linux.O_RDWR, 0), 64<<10, true)
	if _, ok := s.cached[4096]; ok {
		t.Error("a translation of the backing file stays beside a writable mapping")
	}
	ws.page(e, w, 8192, hostarch.Read, func([]byte) {})
	s.page(e, m, 8192, hostarch.Read, func([]byte) {})
	ws.page(e, w, 8192, hostarch.ReadWrite, func(p []byte) { p[7] = 'y' })
	s.page(e, m, 8192, hostarch.Read, func(p []byte) {
		if p[7] != 'y' || !bytes.Equal(p[8:], data[8200:12288]) {
			t.Error("what was written through a mapping is not in another")
		}
	})
	copy(data[100:], "x")
	data[8192+7] = 'y'
	e.same("/f", data)
}

func (*watched) fdOf(e *env, path string) *vfs.FileDescription {
	fd := e.mustOpen(path, linux.O_RDWR, 0)
	e.t.Cleanup(func() { fd.DecRef(e.ctx) })
	return fd
}

// Whatever happens to a mapped file, its mappings and reads agree with a model.
func TestLayeredModel(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 3))
			const most = 96 << 10
			model := pattern(most/2+1000*int(seed), byte(seed))
			e := newLayeredEnv(t, func(e *env) { e.put("/f", model) })
			fd := e.mustOpen("/f", linux.O_RDWR, 0)
			t.Cleanup(func() { fd.DecRef(e.ctx) })
			m, s := e.mapIt(e.mustOpen("/f", linux.O_RDWR, 0), most, false)
			spaces := []*watched{s}
			for n := range 60 {
				if n == 10 && seed%3 == 0 {
					_, s := e.mapIt(e.mustOpen("/f", linux.O_RDWR, 0), most, true)
					spaces = append(spaces, s)
				}
				off, size := r.IntN(most-8192), len(model)
				count := 1 + r.IntN(8192)
				grow := func(end int) {
					if end > len(model) {
						model = append(model, make([]byte, end-len(model))...)
					}
				}
				switch r.IntN(7) {
				case 0, 1:
					p := pattern(count, byte(n))
					e.pwrite(fd, p, int64(off))
					grow(off + count)
					copy(model[off:], p)
				case 2:
					e.truncate("/f", uint64(off))
					grow(off)
					model = model[:off]
				case 3:
					e.ok(fd.Allocate(e.ctx, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, uint64(off), uint64(count)))
					if off < size {
						clear(model[off:min(size, off+count)])
					}
				case 4:
					e.ok(fd.Allocate(e.ctx, unix.FALLOC_FL_ZERO_RANGE, uint64(off), uint64(count)))
					grow(off + count)
					clear(model[off : off+count])
				case 5:
					e.ok(fd.Allocate(e.ctx, 0, uint64(off), uint64(count)))
					grow(off + count)
				case 6:
					if len(spaces) == 2 && len(model) > 0 {
						at := r.IntN(len(model))
						spaces[1].page(e, m, uint64(at)&^4095, hostarch.ReadWrite, func(p []byte) { p[at%4096] = byte(n) })
						model[at] = byte(n)
					}
				}
				for _, s := range spaces {
					for page := uint64(0); page < most; page += hostarch.PageSize {
						if r.IntN(4) == 0 {
							continue // stays as it was
						}
						there := s.page(e, m, page, hostarch.Read, func(p []byte) {
							rest := model[min(page, uint64(len(model))):]
							if k := min(len(rest), len(p)); !bytes.Equal(p[:k], rest[:k]) {
								t.Errorf("step %d: page %#x of a mapping is wrong", n, page)
							}
						})
						if there != (page < pageEnd(int64(len(model)))) {
							t.Errorf("step %d: page %#x of %d bytes: %v", n, page, len(model), there)
						}
					}
				}
				e.same("/f", model)
				if t.Failed() {
					return
				}
			}
		})
	}
}

// A mapping never shows less than what a write has finished before it was looked at.
func TestLayeredRaces(t *testing.T) {
	const pages = 64
	e := newLayeredEnv(t, func(e *env) { e.put("/f", make([]byte, pages<<12)) })
	fd := e.mustOpen("/f", linux.O_RDWR, 0)
	t.Cleanup(func() { fd.DecRef(e.ctx) })
	var written [pages]atomic.Uint64
	deadline := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() { // writers, each of its own pages
			r := rand.New(rand.NewPCG(uint64(g), 1))
			var p [8]byte
			for n := uint64(1); time.Now().Before(deadline); n++ {
				page := r.IntN(pages/2)*2 + g
				binary.LittleEndian.PutUint64(p[:], n)
				if _, err := fd.PWrite(e.ctx, usermem.BytesIOSequence(p[:]), int64(page)<<12, vfs.WriteOptions{}); err != nil {
					t.Error(err)
				}
				written[page].Store(n)
			}
		})
	}
	for g := range 2 {
		m, s := e.mapIt(e.mustOpen("/f", linux.O_RDWR, 0), pages<<12, false)
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 2))
			for time.Now().Before(deadline) && !t.Failed() {
				page := r.IntN(pages)
				least := written[page].Load()
				s.page(e, m, uint64(page)<<12, hostarch.Read, func(p []byte) {
					if got := binary.LittleEndian.Uint64(p); got < least {
						t.Errorf("page %d shows %d, %d was written", page, got, least)
					}
				})
			}
		})
	}
	wg.Wait()
}
