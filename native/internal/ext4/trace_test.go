package ext4

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gvx.dev/gvx/native/internal/blockdev"
)

// The cut-off test: a workload runs on a device that records everything written
// and flushed; tests/property/test_driver_cut.py cuts the recording anywhere,
// recovers what is left and compares the tree with the states noted here.

// recorder is a Device that writes down what reaches it. Each operation is noted
// at the moment it is done, one after the other.
type recorder struct {
	blockdev.Device
	mu  sync.Mutex
	out *bufio.Writer
	n   int // events
}

// Events of a trace: a letter, two numbers, and the bytes of a write.
const (
	eventWrite   = 'W' // offset, length
	eventFlush   = 'F'
	eventDiscard = 'Z' // offset, length
	eventSynced  = 'S' // state promised from here on
)

func (r *recorder) note(kind byte, a, b uint64, data []byte) {
	var head [17]byte
	head[0] = kind
	binary.LittleEndian.PutUint64(head[1:], a)
	binary.LittleEndian.PutUint64(head[9:], b)
	r.out.Write(head[:]) //nolint:errcheck // Flush tells
	r.out.Write(data)    //nolint:errcheck
	r.n++
}

func (r *recorder) WriteAt(p []byte, off int64) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note(eventWrite, uint64(off), uint64(len(p)), p)
	return r.Device.WriteAt(p, off)
}

func (r *recorder) Flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note(eventFlush, 0, 0, nil)
	return nil
}

func (r *recorder) Discard(off, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note(eventDiscard, uint64(off), uint64(n), nil)
	return r.Device.Discard(off, n)
}

// traced is a file of the model.
type traced struct {
	kind   uint8
	mode   uint16
	data   []byte
	target string
	xattrs map[string][]byte
	open   *Inode // held open by the workload
}

// workload drives a volume and a model of it in step.
type workload struct {
	t      *testing.T
	fs     *FS
	dev    *recorder
	r      *rand.Rand
	names  map[string]*traced // by path, "" is the root
	states []string           // digests
	facts  *os.File           // all of them, for whoever wants to know what differs
	seeds  uint64
	orphan []*traced
}

// line is what is compared of one file; test_driver_cut.py writes the same.
func line(path string, n *traced, links int) string {
	s := fmt.Sprintf("%s|%d|%o|%d|%d|%08x|%s", path, n.kind, n.mode, links, len(n.data), crc32.ChecksumIEEE(n.data), n.target)
	var names []string
	for x := range n.xattrs {
		names = append(names, x)
	}
	sort.Strings(names)
	for _, x := range names {
		s += fmt.Sprintf("|%s=%08x", x, crc32.ChecksumIEEE(n.xattrs[x]))
	}
	return s
}

// state notes what the tree is now; it may be found from the next event on.
func (w *workload) state() {
	links := map[*traced]int{}
	for p, n := range w.names {
		links[n]++
		if n.kind == TypeDir && p != "" {
			links[n]++
			links[w.names[strings.TrimPrefix(filepath.Dir("/"+p), "/")]]++
		}
	}
	var lines []string
	for p, n := range w.names {
		if p != "" {
			lines = append(lines, line(p, n, links[n]))
		}
	}
	sort.Strings(lines)
	text := strings.Join(lines, "\n")
	w.states = append(w.states, fmt.Sprintf("%x", sha256.Sum256([]byte(text)))[:16])
	fmt.Fprintf(w.facts, "== %d\n%s\n", len(w.states)-1, text)
}

// synced notes that the present state was promised.
func (w *workload) synced() {
	w.dev.mu.Lock()
	w.dev.note(eventSynced, uint64(len(w.states)-1), 0, nil)
	w.dev.mu.Unlock()
}

// inode looks a path up; the caller drops it.
func (w *workload) inode(path string) *Inode {
	i, err := lookup(w.fs, path)
	must(w.t, err)
	return i
}

// pick gives a random path of that kind, "" when there is none (or the root for directories).
func (w *workload) pick(kind uint8) string {
	var list []string
	for p, n := range w.names {
		if n.kind == kind && p != "" {
			list = append(list, p)
		}
	}
	if len(list) == 0 {
		return ""
	}
	sort.Strings(list)
	return list[w.r.IntN(len(list))]
}

func (w *workload) fresh() (parent, path string) {
	parent = ""
	if w.r.IntN(3) > 0 {
		parent = w.pick(TypeDir)
	}
	w.seeds++
	name := fmt.Sprintf("n%d%s", w.seeds, strings.Repeat("x", w.r.IntN(60)))
	return parent, strings.TrimPrefix(parent+"/"+name, "/")
}

// in does something in the directory of path.
func (w *workload) in(path string, fn func(dir *Inode, name string) error) error {
	dir, name := filepath.Split(path)
	d := w.inode(strings.TrimSuffix(dir, "/"))
	defer d.DecRef()
	return fn(d, name)
}

// done ends an operation: false when there was no space, which changes nothing.
func (w *workload) done(err error) bool {
	if errors.Is(err, syscall.ENOSPC) {
		return false
	}
	must(w.t, err)
	w.state()
	return true
}

// bytesAt makes the bytes of a file: never zero, and different for every file and write.
func bytesAt(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 5))
	p := make([]byte, n)
	for k := range p {
		p[k] = byte(r.Uint32()%255) + 1
	}
	return p
}

func (w *workload) create(kind uint8) string {
	_, path := w.fresh()
	n := &traced{kind: kind, mode: 0o644, xattrs: map[string][]byte{}}
	new := New{Mode: syscall.S_IFREG | n.mode}
	switch kind {
	case TypeDir:
		n.mode = 0o755
		new.Mode = syscall.S_IFDIR | n.mode
	case TypeSymlink:
		n.mode = 0o777
		n.target = strings.Repeat("t", 1+w.r.IntN(150))
		new = New{Mode: syscall.S_IFLNK | n.mode, Target: n.target}
	}
	err := w.in(path, func(d *Inode, name string) error {
		i, err := d.Create(name, new)
		if err == nil {
			i.DecRef()
		}
		return err
	})
	if errors.Is(err, syscall.ENOSPC) {
		return ""
	}
	w.names[path] = n
	w.done(err)
	return path
}

// append writes at the end of a file, maybe behind a gap, and notes a state for every piece.
func (w *workload) append(path string, gap, size int) {
	n := w.names[path]
	i := w.inode(path)
	defer i.DecRef()
	w.seeds++
	data := bytesAt(w.seeds, size)
	off := len(n.data) + gap
	_, err := i.WriteFunc(int64(off), int64(size), func(devOff, fileOff, m int64) error {
		at := int(fileOff) - off
		if at > 0 { // the piece before is in the map
			n.data = append(append(n.data[:min(len(n.data), off)], make([]byte, max(off-len(n.data), 0))...), data[:at]...)
			w.state()
		}
		_, err := w.fs.dev.WriteAt(data[at:at+int(m)], devOff)
		return err
	})
	if errors.Is(err, syscall.ENOSPC) {
		if got := int(i.Size()); got > off { // as much as there was room for
			n.data = append(append(n.data[:min(len(n.data), off)], make([]byte, max(off-len(n.data), 0))...), data[:got-off]...)
			w.state()
		}
		return
	}
	n.data = append(append(n.data[:min(len(n.data), off)], make([]byte, max(off-len(n.data), 0))...), data...)
	w.done(err)
}

// mapped writes as a shared mapping does: blocks first, bytes in place, then the size.
func (w *workload) mapped(path string) {
	n := w.names[path]
	bs := int(w.fs.BlockSize())
	if len(n.data)%bs != 0 {
		return
	}
	i := w.inode(path)
	defer i.DecRef()
	w.seeds++
	data := bytesAt(w.seeds, bs*(1+w.r.IntN(4)))
	ext, err := i.Extents(int64(len(n.data)), int64(len(data)), true)
	if errors.Is(err, syscall.ENOSPC) {
		return
	}
	must(w.t, err)
	for _, e := range ext {
		at := e.FileOff - int64(len(n.data))
		_, err := w.fs.dev.WriteAt(data[at:at+e.Len], e.DevOff)
		must(w.t, err)
	}
	n.data = append(n.data, data...)
	w.done(i.SetSize(int64(len(n.data))))
}

func (w *workload) unlink(path string) {
	n := w.names[path]
	hold := n.kind == TypeRegular && len(w.orphan) < 4 && w.r.IntN(3) == 0
	if hold {
		i := w.inode(path)
		n.open = i
		w.orphan = append(w.orphan, n)
	}
	delete(w.names, path)
	w.done(w.in(path, func(d *Inode, name string) error {
		if n.kind == TypeDir {
			return d.Rmdir(name)
		}
		return d.Unlink(name)
	}))
}

// letGo closes a file without a name.
func (w *workload) letGo() {
	if len(w.orphan) > 0 {
		w.orphan[0].open.DecRef()
		w.orphan = w.orphan[1:]
	}
}

func (w *workload) empty(dir string) bool {
	for p := range w.names {
		if strings.HasPrefix(p, dir+"/") {
			return false
		}
	}
	return true
}

func (w *workload) rename() {
	from := w.pick(TypeRegular)
	if w.r.IntN(4) == 0 {
		from = w.pick(TypeDir)
	}
	if from == "" {
		return
	}
	n := w.names[from]
	_, to := w.fresh()
	if other := w.pick(n.kind); w.r.IntN(2) == 0 && other != "" && (n.kind != TypeDir || w.empty(other)) {
		to = other
	}
	if to == from || strings.HasPrefix(to, from+"/") || strings.HasPrefix(from, to+"/") || w.names[to] == n {
		return
	}
	od, nd := w.inode(strings.TrimSuffix(filepath.Dir("/"+from), "/")), w.inode(strings.TrimSuffix(filepath.Dir("/"+to), "/"))
	defer od.DecRef()
	defer nd.DecRef()
	err := w.fs.Rename(od, filepath.Base(from), nd, filepath.Base(to), 0)
	if errors.Is(err, syscall.ENOSPC) {
		return
	}
	delete(w.names, from)
	w.names[to] = n
	for p, o := range w.names {
		if rest, ok := strings.CutPrefix(p, from+"/"); ok {
			delete(w.names, p)
			w.names[to+"/"+rest] = o
		}
	}
	w.done(err)
}

func (w *workload) link() {
	from := w.pick(TypeRegular)
	if from == "" {
		return
	}
	_, to := w.fresh()
	i := w.inode(from)
	defer i.DecRef()
	err := w.in(to, func(d *Inode, name string) error { return d.Link(name, i) })
	if !errors.Is(err, syscall.ENOSPC) {
		w.names[to] = w.names[from]
		w.done(err)
	}
}

func (w *workload) xattr() {
	path := w.pick(TypeRegular)
	if path == "" {
		return
	}
	n := w.names[path]
	i := w.inode(path)
	defer i.DecRef()
	name := fmt.Sprintf("user.x%d", w.r.IntN(4))
	if _, ok := n.xattrs[name]; ok && w.r.IntN(2) == 0 {
		delete(n.xattrs, name)
		w.done(i.RemoveXattr(name))
		return
	}
	value := bytesAt(w.seeds, w.r.IntN(300))
	w.seeds++
	err := i.SetXattr(name, value, 0)
	if !errors.Is(err, syscall.ENOSPC) {
		n.xattrs[name] = value
		w.done(err)
	}
}

// truncate cuts at a block: what lies behind it in the same block would be zeroed in place.
func (w *workload) truncate() {
	path := w.pick(TypeRegular)
	if path == "" {
		return
	}
	n := w.names[path]
	i := w.inode(path)
	defer i.DecRef()
	bs := int(w.fs.BlockSize())
	size := w.r.IntN(len(n.data)/bs+2) * bs
	if size > len(n.data) {
		n.data = append(n.data, make([]byte, size-len(n.data))...)
	} else {
		n.data = n.data[:size]
	}
	w.done(i.Truncate(int64(size)))
}

// fragment makes a file of many extents, then punches or cuts it.
func (w *workload) fragment() {
	path := w.create(TypeRegular)
	if path == "" {
		return
	}
	bs := int(w.fs.BlockSize())
	for range 10 + w.r.IntN(500) {
		w.append(path, bs, bs)
	}
	if w.r.IntN(2) == 0 {
		w.sync()
	}
	n := w.names[path]
	i := w.inode(path)
	defer i.DecRef()
	n.data = n.data[:len(n.data)/bs/2*bs]
	w.done(i.Truncate(int64(len(n.data))))
	if w.r.IntN(2) == 0 {
		w.unlink(path)
	}
}

// reuse gives blocks back and wants them again at once: those of files and, worse, of directories.
func (w *workload) reuse() {
	dir := w.create(TypeDir)
	if dir == "" {
		return
	}
	d := w.inode(dir)
	var made []string
	for k := range 60 {
		name := fmt.Sprintf("%d%s", k, strings.Repeat("y", 200))
		i, err := d.Create(name, New{Mode: syscall.S_IFREG | 0o600})
		if errors.Is(err, syscall.ENOSPC) {
			break
		}
		must(w.t, err)
		i.DecRef()
		made = append(made, name)
		w.names[dir+"/"+name] = &traced{kind: TypeRegular, mode: 0o600, xattrs: map[string][]byte{}}
		w.state()
	}
	w.sync()
	for _, name := range made {
		delete(w.names, dir+"/"+name)
		w.done(d.Unlink(name))
	}
	d.DecRef()
	w.unlink(dir)
	if w.r.IntN(2) == 0 {
		w.sync()
	}
	if path := w.create(TypeRegular); path != "" {
		w.append(path, 0, 100_000)
		w.sync()
	}
}

func (w *workload) sync() {
	must(w.t, w.fs.Sync())
	w.synced()
}

// fsync syncs one file: that promises the state that it was changed in last, which is the present one here.
func (w *workload) fsync() {
	path := w.create(TypeRegular)
	if path == "" {
		return
	}
	w.append(path, 0, 1+w.r.IntN(9000))
	i := w.inode(path)
	defer i.DecRef()
	must(w.t, i.Sync(w.r.IntN(2) == 0))
	w.synced()
}

func (w *workload) step() {
	switch k := w.r.IntN(100); {
	case k < 12:
		w.create(TypeRegular)
	case k < 18:
		w.create(TypeDir)
	case k < 22:
		w.create(TypeSymlink)
	case k < 42:
		if p := w.pick(TypeRegular); p != "" {
			w.append(p, w.r.IntN(2)*w.r.IntN(10000), 1+w.r.IntN(40000))
		}
	case k < 46:
		if p := w.pick(TypeRegular); p != "" {
			w.mapped(p)
		}
	case k < 60:
		if p := w.pick(TypeRegular); p != "" {
			w.unlink(p)
		}
	case k < 63:
		if p := w.pick(TypeDir); p != "" && w.empty(p) {
			w.unlink(p)
		}
	case k < 64:
		if p := w.pick(TypeSymlink); p != "" {
			w.unlink(p)
		}
	case k < 72:
		w.rename()
	case k < 75:
		w.link()
	case k < 80:
		w.xattr()
	case k < 84:
		w.truncate()
	case k < 85:
		w.fragment()
	case k < 86:
		w.reuse()
	case k < 90:
		w.letGo()
	case k < 95:
		w.fsync()
	default:
		w.sync()
	}
}

// TestWriteTraces records workloads for test_driver_cut.py. GVX_TRACES names the directory: in it one image NAME.ext4 a
// volume to use, with a line of options in NAME.opts ("durable seed steps"); the trace is put beside it.
func TestWriteTraces(t *testing.T) {
	dir := os.Getenv("GVX_TRACES")
	if dir == "" {
		t.Skip("GVX_TRACES names no directory: tests/property/test_driver_cut.py runs this")
	}
	images, err := filepath.Glob(filepath.Join(dir, "*.ext4"))
	must(t, err)
	for _, img := range images {
		base := strings.TrimSuffix(img, ".ext4")
		t.Run(filepath.Base(base), func(t *testing.T) {
			t.Parallel()
			recordTrace(t, img, base)
		})
	}
}

func recordTrace(t *testing.T, img, base string) {
	var o struct {
		Durable bool
		Seed    uint64
		Steps   int
	}
	raw, err := os.ReadFile(base + ".opts")
	must(t, err)
	must(t, json.Unmarshal(raw, &o))
	work := base + ".work"
	copyFile(t, img, work)
	f, err := os.Create(base + ".trace")
	must(t, err)
	dev := &recorder{Device: device(t, work, false), out: bufio.NewWriterSize(f, 1<<20)}
	fs, err := Open(dev, Options{Durable: o.Durable, CommitInterval: 20 * time.Millisecond})
	must(t, err)
	w := &workload{t: t, fs: fs, dev: dev, r: rand.New(rand.NewPCG(o.Seed, 1)), names: map[string]*traced{"": {kind: TypeDir}}}
	w.facts, err = os.Create(base + ".facts")
	must(t, err)
	w.state()
	w.synced()
	// How many commits the steps become depends on the machine; a trace in which
	// the log never fills would not show checkpoints and what follows them.
	for n := 0; n < o.Steps || n < 20*o.Steps && fs.journal.Stats().Checkpoints < 2; n++ {
		w.step()
	}
	for len(w.orphan) > 0 {
		w.letGo()
	}
	stats := fs.journal.Stats()
	finish(t, fs, work)
	w.synced()
	must(t, dev.out.Flush())
	must(t, f.Close())
	must(t, w.facts.Close())
	out, err := json.Marshal(map[string]any{"states": w.states, "events": dev.n, "journal": stats})
	must(t, err)
	must(t, os.WriteFile(base+".states", out, 0o644))
	t.Logf("%d events, %d states, %+v", dev.n, len(w.states), stats)
	if stats.Overruns != 0 {
		t.Errorf("%d blocks more than announced", stats.Overruns)
	}
}
