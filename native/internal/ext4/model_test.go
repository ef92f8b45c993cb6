package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// node is an inode of the model, which is what a file system should be: maps and bytes.
type node struct {
	mode     uint16
	uid      uint32
	nlink    int
	data     []byte // target of symlinks
	xattrs   map[string][]byte
	children map[string]*node
	parent   *node
}

func (n *node) isDir() bool { return n.mode&syscall.S_IFMT == syscall.S_IFDIR }

// machine runs random operations on a volume and on the model, and compares
// every result.
type machine struct {
	t     testing.TB
	rnd   *rand.Rand
	fs    *FS
	root  *node
	dirs  []*node
	names []string
	full  bool // ENOSPC is allowed
	seen  int  // times it came
	log   []string
}

func newMachine(t testing.TB, fs *FS, seed uint64) *machine {
	root := &node{mode: syscall.S_IFDIR | 0o755, nlink: 3, children: map[string]*node{}}
	root.parent = root
	m := &machine{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), fs: fs, root: root, dirs: []*node{root}}
	for k := range 40 {
		m.names = append(m.names, fmt.Sprintf("n%d", k), strings.Repeat("long", 1+m.rnd.IntN(60))+fmt.Sprint(k))
	}
	return m
}

// path gives the model's path of a directory.
func (m *machine) path(d *node) string {
	if d == m.root {
		return ""
	}
	for name, c := range d.parent.children {
		if c == d {
			return m.path(d.parent) + "/" + name
		}
	}
	m.t.Fatal("model: directory lost")
	return ""
}

func (m *machine) dir() (*node, *Inode) {
	d := m.dirs[m.rnd.IntN(len(m.dirs))]
	i, err := lookup(m.fs, m.path(d))
	if err != nil {
		m.fail("directory %s: %v", m.path(d), err)
	}
	return d, i
}

// name picks a name, mostly one that exists when want is set.
func (m *machine) name(d *node, exists bool) string {
	if exists && m.rnd.IntN(8) > 0 && len(d.children) > 0 {
		names := make([]string, 0, len(d.children))
		for n := range d.children {
			names = append(names, n)
		}
		slices.Sort(names)
		return names[m.rnd.IntN(len(names))]
	}
	return m.names[m.rnd.IntN(len(m.names))]
}

func (m *machine) fail(format string, args ...any) {
	m.t.Helper()
	tail := m.log[max(0, len(m.log)-12):]
	m.t.Fatalf("%s\nlast operations:\n%s", fmt.Sprintf(format, args...), strings.Join(tail, "\n"))
}

// expect compares an error with the model's; it is false when the operation
// failed (rightly).
func (m *machine) expect(got error, want error) bool {
	m.t.Helper()
	if m.full && want == nil && errors.Is(got, syscall.ENOSPC) {
		m.seen++
		return false
	}
	if !errors.Is(got, want) {
		m.fail("got error %v, want %v", got, want)
	}
	return want == nil
}

func (m *machine) note(format string, args ...any) {
	m.log = append(m.log, strings.ReplaceAll(fmt.Sprintf(format, args...), "longlong", "L"))
}

func (m *machine) create() {
	d, i := m.dir()
	defer i.DecRef()
	name := m.name(d, false)
	kinds := []uint16{syscall.S_IFREG, syscall.S_IFREG, syscall.S_IFREG, syscall.S_IFDIR, syscall.S_IFDIR, syscall.S_IFLNK,
		syscall.S_IFCHR, syscall.S_IFBLK, syscall.S_IFIFO, syscall.S_IFSOCK}
	n := New{Mode: kinds[m.rnd.IntN(len(kinds))] | uint16(m.rnd.IntN(0o10000)), UID: m.rnd.Uint32() >> m.rnd.IntN(32)}
	kind := n.Mode & syscall.S_IFMT
	if kind == syscall.S_IFLNK {
		n.Mode = syscall.S_IFLNK | 0o777
		n.Target = strings.Repeat("t", 1+m.rnd.IntN([]int{58, 61, 1000}[m.rnd.IntN(3)]))
	}
	if kind == syscall.S_IFCHR || kind == syscall.S_IFBLK {
		n.RdevMajor, n.RdevMinor = uint32(m.rnd.IntN(400)), uint32(m.rnd.IntN(1<<20))
	}
	m.note("create %s/%s %o", m.path(d), name, n.Mode)
	c, err := i.Create(name, n)
	var want error
	if d.children[name] != nil {
		want = syscall.EEXIST
	}
	if !m.expect(err, want) {
		return
	}
	c.DecRef()
	x := &node{mode: n.Mode, uid: n.UID, nlink: 1, data: []byte(n.Target), parent: d}
	if kind == syscall.S_IFDIR {
		x.nlink, x.children = 2, map[string]*node{}
		d.nlink++
		m.dirs = append(m.dirs, x)
	}
	d.children[name] = x
}

func (m *machine) unlink() {
	d, i := m.dir()
	defer i.DecRef()
	name := m.name(d, true)
	c := d.children[name]
	m.note("unlink %s/%s", m.path(d), name)
	err := i.Unlink(name)
	switch {
	case c == nil:
		m.expect(err, syscall.ENOENT)
	case c.isDir():
		m.expect(err, syscall.EISDIR)
		m.note("rmdir %s/%s", m.path(d), name)
		err := i.Rmdir(name)
		if len(c.children) > 0 {
			m.expect(err, syscall.ENOTEMPTY)
		} else if m.expect(err, nil) {
			d.nlink--
			m.drop(d, name)
		}
	default:
		if m.expect(err, nil) {
			m.drop(d, name)
		}
	}
}

// drop removes a name from the model.
func (m *machine) drop(d *node, name string) {
	c := d.children[name]
	c.nlink--
	delete(d.children, name)
	if c.isDir() {
		m.dirs = slices.DeleteFunc(m.dirs, func(x *node) bool { return x == c })
	}
}

func (m *machine) link() {
	d, i := m.dir()
	defer i.DecRef()
	from, j := m.dir()
	defer j.DecRef()
	old, name := m.name(from, true), m.name(d, false)
	c := from.children[old]
	if c == nil {
		return
	}
	m.note("link %s/%s -> %s/%s", m.path(from), old, m.path(d), name)
	target, err := j.Lookup(old)
	must(m.t, err)
	defer target.DecRef()
	err = i.Link(name, target)
	switch {
	case c.isDir():
		m.expect(err, syscall.EPERM)
	case d.children[name] != nil:
		m.expect(err, syscall.EEXIST)
	case m.expect(err, nil):
		d.children[name] = c
		c.nlink++
	}
}

// above tells whether a is b or above it.
func above(a, b *node) bool {
	for ; ; b = b.parent {
		if a == b {
			return true
		}
		if b.parent == b {
			return false
		}
	}
}

func (m *machine) rename() {
	od, oi := m.dir()
	defer oi.DecRef()
	nd, ni := m.dir()
	defer ni.DecRef()
	oname, nname := m.name(od, true), m.name(nd, m.rnd.IntN(2) == 0)
	flags := []uint32{0, 0, RenameNoReplace, RenameExchange, RenameWhiteout, RenameWhiteout | RenameNoReplace}[m.rnd.IntN(6)]
	m.tryRename(od, oi, oname, nd, ni, nname, flags)
}

// tryRename renames in both and compares.
func (m *machine) tryRename(od *node, oi *Inode, oname string, nd *node, ni *Inode, nname string, flags uint32) {
	m.t.Helper()
	m.note("rename %s/%s -> %s/%s flags %d", m.path(od), oname, m.path(nd), nname, flags)
	err := m.fs.Rename(oi, oname, ni, nname, flags)
	src, dst := od.children[oname], nd.children[nname]
	var want error
	switch {
	case src == nil:
		want = syscall.ENOENT
	case dst != nil && flags&RenameNoReplace != 0:
		want = syscall.EEXIST
	case dst == nil && flags&RenameExchange != 0:
		want = syscall.ENOENT
	case src == dst:
		m.expect(err, nil)
		return
	case src.isDir() && above(src, nd):
		want = syscall.EINVAL
	case dst != nil && dst.isDir() && above(dst, od) && flags&RenameExchange != 0:
		want = syscall.EINVAL
	case flags&RenameExchange != 0:
	case dst != nil && dst.isDir() && above(dst, od):
		want = syscall.ENOTEMPTY
	case dst != nil && src.isDir() && !dst.isDir():
		want = syscall.ENOTDIR
	case dst != nil && !src.isDir() && dst.isDir():
		want = syscall.EISDIR
	case dst != nil && dst.isDir() && len(dst.children) > 0:
		want = syscall.ENOTEMPTY
	}
	if !m.expect(err, want) {
		return
	}
	moved := func(x *node, from, to *node) {
		if x.isDir() {
			from.nlink--
			to.nlink++
			x.parent = to
		}
	}
	if flags&RenameExchange != 0 {
		od.children[oname], nd.children[nname] = dst, src
		moved(src, od, nd)
		moved(dst, nd, od)
		return
	}
	if dst != nil {
		if dst.isDir() {
			nd.nlink--
		}
		m.drop(nd, nname)
	}
	delete(od.children, oname)
	nd.children[nname] = src
	moved(src, od, nd)
	if flags&RenameWhiteout != 0 {
		od.children[oname] = &node{mode: syscall.S_IFCHR, nlink: 1, parent: od}
	}
}

// file picks a regular file.
func (m *machine) file() (*node, *Inode, string) {
	for range 20 {
		d, i := m.dir()
		name := m.name(d, true)
		c := d.children[name]
		if c == nil || c.mode&syscall.S_IFMT != syscall.S_IFREG {
			i.DecRef()
			continue
		}
		f, err := i.Lookup(name)
		i.DecRef()
		must(m.t, err)
		return c, f, m.path(d) + "/" + name
	}
	return nil, nil, ""
}

const (
	modelMax = 300_000
	rubbish  = 0xEE // what mappings leave behind the end of file
)

// splice puts p at off of the model's data.
func (n *node) splice(p []byte, off int) {
	if need := off + len(p); need > len(n.data) {
		n.data = append(n.data, make([]byte, need-len(n.data))...)
	}
	copy(n.data[off:], p)
}

func (n *node) resize(size int) {
	if size <= len(n.data) {
		n.data = slices.Clone(n.data[:size])
		return
	}
	n.splice(nil, size)
}

func (m *machine) data() {
	c, f, path := m.file()
	if f == nil {
		return
	}
	defer f.DecRef()
	off := m.rnd.IntN(modelMax)
	if m.rnd.IntN(3) == 0 {
		off = len(c.data)
	}
	n := 1 + m.rnd.IntN([]int{10, 5000, 60000}[m.rnd.IntN(3)])
	switch op := m.rnd.IntN(10); op {
	case 0, 1, 2, 3:
		p := make([]byte, n)
		for k := range p {
			p[k] = byte(m.rnd.Uint32() | 1)
		}
		m.note("write %s %d+%d", path, off, n)
		done, err := f.WriteAt(p, int64(off))
		if err == nil && done != n {
			m.fail("wrote %d of %d without an error", done, n)
		}
		m.expect(err, nil)
		if done > 0 {
			c.splice(p[:done], off)
		}
	case 4:
		m.note("truncate %s %d", path, off)
		if m.expect(f.Truncate(int64(off)), nil) {
			c.resize(off)
		}
	case 5:
		m.note("punch %s %d+%d", path, off, n)
		if m.expect(f.Fallocate(FallocPunchHole|FallocKeepSize, int64(off), int64(n)), nil) && off < len(c.data) {
			clear(c.data[off:min(off+n, len(c.data))])
		}
	case 6:
		m.note("zero %s %d+%d", path, off, n)
		err := f.Fallocate(FallocZeroRange, int64(off), int64(n))
		if m.expect(err, nil) {
			c.splice(make([]byte, n), off)
		} else if off < len(c.data) {
			clear(c.data[off:min(off+n, len(c.data))])
		}
	case 7:
		mode := uint32(m.rnd.IntN(2)) * FallocKeepSize
		m.note("fallocate %d %s %d+%d", mode, path, off, n)
		if m.expect(f.Fallocate(mode, int64(off), int64(n)), nil) && mode == 0 && off+n > len(c.data) {
			c.resize(off + n)
		}
	case 8: // written in place, as sentryfs does for mappings
		m.note("extents %s %d+%d", path, off, n)
		exts, err := f.Extents(int64(off), int64(n), true)
		if !m.expect(err, nil) {
			return
		}
		bs := m.fs.BlockSize()
		at := int64(off) &^ (bs - 1)
		for _, e := range exts {
			if e.FileOff != at || e.Hole {
				m.fail("extent %+v, want one at %d", e, at)
			}
			at += e.Len
			p := make([]byte, e.Len)
			_, err := m.fs.dev.ReadAt(p, e.DevOff)
			must(m.t, err)
			for k := range p { // as the model has it, zero behind the end
				want := byte(0)
				if o := int(e.FileOff) + k; o < len(c.data) {
					want = c.data[o]
				}
				if p[k] != want && (p[k] != rubbish || int(e.FileOff)+k < len(c.data)) {
					m.fail("byte %d of the extents is %d, want %d", int(e.FileOff)+k, p[k], want)
				}
				if o := int(e.FileOff) + k; o < len(c.data) {
					p[k]++
					c.data[o]++
				} else {
					p[k] = rubbish // a mapping may leave rubbish behind the end
				}
			}
			_, err = m.fs.dev.WriteAt(p, e.DevOff)
			must(m.t, err)
		}
		if at < int64(off+n) {
			m.fail("extents end at %d", at)
		}
		// Rubbish beyond the block with the end of file would be a mapping past it,
		// which gives SIGBUS: clean those.
		if end := (int64(len(c.data)) + bs - 1) &^ (bs - 1); at > end {
			must(m.t, f.Fallocate(FallocPunchHole|FallocKeepSize, end, at-end))
		}
	case 9:
		m.note("seek %s %d", path, off)
		hole, herr := f.SeekHole(int64(off))
		data, derr := f.SeekData(int64(off))
		if off >= len(c.data) {
			m.expect(herr, syscall.ENXIO)
			m.expect(derr, syscall.ENXIO)
			return
		}
		if derr == nil && hole == data || herr != nil {
			m.fail("hole at %d (%v), data at %d (%v)", hole, herr, data, derr)
		}
		end := int64(len(c.data))
		if derr == nil {
			end = data
		}
		if hole == int64(off) {
			for k := int64(off); k < end; k++ {
				if c.data[k] != 0 {
					m.fail("byte %d is in a hole of %d to %d and not zero", k, off, end)
				}
			}
		}
	}
	m.check(path, c, f)
}

// check compares contents.
func (m *machine) check(path string, c *node, f *Inode) {
	m.t.Helper()
	got, err := contents(f)
	must(m.t, err)
	if bytes.Equal(got, c.data) {
		return
	}
	if len(got) != len(c.data) {
		m.fail("%s: %d bytes, want %d", path, len(got), len(c.data))
	}
	for k := range got {
		if got[k] != c.data[k] {
			m.fail("%s: byte %d is %d, want %d", path, k, got[k], c.data[k])
		}
	}
}

func (m *machine) xattr() {
	d, i := m.dir()
	defer i.DecRef()
	name := m.name(d, true)
	c := d.children[name]
	if c == nil {
		return
	}
	f, err := i.Lookup(name)
	must(m.t, err)
	defer f.DecRef()
	key := []string{"user.a", "user.b", "trusted.overlay.opaque", "security.selinux", "user.a-longer-name"}[m.rnd.IntN(5)]
	if k := c.mode & syscall.S_IFMT; k != syscall.S_IFREG && k != syscall.S_IFDIR {
		key = "trusted.other" // Linux shows no user attributes of these
	}
	if m.rnd.IntN(3) == 0 {
		m.note("removexattr %s/%s %s", m.path(d), name, key)
		err := f.RemoveXattr(key)
		if _, ok := c.xattrs[key]; !ok {
			m.expect(err, syscall.ENODATA)
		} else if m.expect(err, nil) {
			delete(c.xattrs, key)
		}
		return
	}
	value := []byte(strings.Repeat("v", m.rnd.IntN([]int{20, 200, 700}[m.rnd.IntN(3)])))
	flags := m.rnd.IntN(3)
	m.note("setxattr %s/%s %s %d flags %d", m.path(d), name, key, len(value), flags)
	err = f.SetXattr(key, value, flags)
	_, ok := c.xattrs[key]
	switch {
	case ok && flags == XattrCreate:
		m.expect(err, syscall.EEXIST)
	case !ok && flags == XattrReplace:
		m.expect(err, syscall.ENODATA)
	case errors.Is(err, syscall.ENOSPC) && (m.full || m.fs.BlockSize() < 4096): // no room in inode and block
	case m.expect(err, nil):
		if c.xattrs == nil {
			c.xattrs = map[string][]byte{}
		}
		c.xattrs[key] = value
	}
}

func (m *machine) step() {
	switch k := m.rnd.IntN(100); {
	case k < 30:
		m.create()
	case k < 45:
		m.unlink()
	case k < 52:
		m.link()
	case k < 65:
		m.rename()
	case k < 90:
		m.data()
	case k < 99:
		m.xattr()
	default:
		must(m.t, m.fs.Sync())
	}
}

// verify compares the whole tree with the model.
func (m *machine) verify() {
	m.t.Helper()
	var walk func(d *node, i *Inode, at string)
	walk = func(d *node, i *Inode, at string) {
		seen := map[string]bool{}
		must(m.t, i.ReadDir(0, func(e Dirent) bool {
			if at == "" && e.Name == "lost+found" {
				return true
			}
			if seen[e.Name] || d.children[e.Name] == nil {
				m.fail("%s/%s: is there twice or should not be", at, e.Name)
			}
			seen[e.Name] = true
			return true
		}))
		if len(seen) != len(d.children) {
			m.fail("%s: %d entries, want %d", at, len(seen), len(d.children))
		}
		for name, c := range d.children {
			f, err := i.Lookup(name)
			must(m.t, err)
			a := f.Attr()
			if a.Mode != c.mode || int(a.Nlink) != c.nlink || a.UID != c.uid {
				m.fail("%s/%s: mode %o links %d uid %d, want %o %d %d", at, name, a.Mode, a.Nlink, a.UID, c.mode, c.nlink, c.uid)
			}
			names, err := f.ListXattr()
			must(m.t, err)
			if len(names) != len(c.xattrs) {
				m.fail("%s/%s: xattrs %v, want %d", at, name, names, len(c.xattrs))
			}
			for key, v := range c.xattrs {
				if got, err := f.GetXattr(key); err != nil || string(got) != string(v) {
					m.fail("%s/%s: xattr %s: %d bytes (%v), want %d", at, name, key, len(got), err, len(v))
				}
			}
			switch c.mode & syscall.S_IFMT {
			case syscall.S_IFREG:
				m.check(at+"/"+name, c, f)
			case syscall.S_IFLNK:
				if to, err := f.Readlink(); err != nil || to != string(c.data) {
					m.fail("%s/%s: link to %q (%v), want %q", at, name, to, err, c.data)
				}
			case syscall.S_IFDIR:
				if up, err := f.Parent(); err != nil || up != i.Ino() {
					m.fail("%s/%s: parent %d (%v), want %d", at, name, up, err, i.Ino())
				}
				walk(c, f, at+"/"+name)
			}
			f.DecRef()
		}
	}
	walk(m.root, m.fs.Root(), "")
}

// TestRandomOperations runs the model beside volumes of every writable kind,
// through several mounts, and has e2fsck and the kernel judge them.
func TestRandomOperations(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	for k, v := range variants {
		if !v.writable {
			continue
		}
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			seed := seed + uint64(k)
			t.Logf("seed %d", seed)
			img := mkfs(t, 64<<20, v.args...)
			fs := open(t, img, Options{CacheBytes: 1})
			m := newMachine(t, fs, seed)
			for round := range 3 {
				if round > 0 {
					m.fs = open(t, img, Options{CacheBytes: 1, NoDiscard: round == 2})
				}
				m.verify()
				for range 600 {
					m.step()
				}
				m.verify()
				finish(t, m.fs, img)
			}
			fs = open(t, img, Options{ReadOnly: true})
			got := tree(t, fs)
			must(t, fs.Close())
			compareTrees(t, got, kernelTree(t, img))
		})
	}
}

// TestRandomOperationsOnAFullVolume runs the model where most things end in ENOSPC.
func TestRandomOperationsOnAFullVolume(t *testing.T) {
	for k, args := range [][]string{
		{"-O", profile + ",^has_journal", "-b", "4096"},
		{"-b", "1024", "-O", "^has_journal", "-N", "200"},
	} {
		seed := uint64(time.Now().UnixNano()) + uint64(k)
		t.Logf("seed %d", seed)
		img := mkfs(t, 2<<20, args...)
		m := newMachine(t, open(t, img, Options{}), seed)
		m.full = true
		for range 3000 {
			m.step()
		}
		m.verify()
		if m.seen < 50 {
			t.Errorf("ENOSPC came %d times only: the test shows little", m.seen)
		}
		finish(t, m.fs, img)
	}
}
