package ext4

import (
	"fmt"
	"syscall"
	"testing"
)

// TestRenameMatrix goes through every kind of source, every kind of thing in
// the way, every flag, within a directory and across, and compares errors and
// outcome with the model.
func TestRenameMatrix(t *testing.T) {
	img := mkfsProfile(t, 64<<20, "-N", "8192")
	fs := open(t, img, Options{})
	m := newMachine(t, fs, 1)
	kinds := []string{"none", "file", "dir", "full", "link", "same", "inside"}
	flags := []uint32{0, RenameNoReplace, RenameExchange, RenameWhiteout, RenameWhiteout | RenameNoReplace}
	for _, src := range kinds {
		for _, dst := range kinds {
			for _, flag := range flags {
				for _, across := range []bool{false, true} {
					m.renameCase(src, dst, flag, across)
				}
			}
		}
	}
	for _, bad := range []uint32{8, RenameExchange | RenameNoReplace, RenameExchange | RenameWhiteout} {
		m.expect(fs.Rename(fs.Root(), "a", fs.Root(), "b", bad), syscall.EINVAL)
	}
	m.verify()
	finish(t, fs, img)
}

// place makes something of a kind in the model and on the volume.
func (m *machine) place(d *node, i *Inode, name, kind string, other *node, otherInode *Inode) (*node, *Inode) {
	m.t.Helper()
	n := New{Mode: syscall.S_IFREG | 0o600}
	switch kind {
	case "none":
		return nil, nil
	case "same":
		if other == nil || other.isDir() {
			return nil, nil
		}
		must(m.t, i.Link(name, otherInode))
		other.nlink++
		d.children[name] = other
		otherInode.IncRef()
		return other, otherInode
	case "dir", "full", "inside":
		n.Mode = syscall.S_IFDIR | 0o700
	case "link":
		n = New{Mode: syscall.S_IFLNK | 0o777, Target: "t"}
	}
	c, err := i.Create(name, n)
	must(m.t, err)
	x := &node{mode: n.Mode, nlink: 1, data: []byte(n.Target), parent: d}
	d.children[name] = x
	if x.isDir() {
		x.nlink, x.children = 2, map[string]*node{}
		d.nlink++
		m.dirs = append(m.dirs, x)
	}
	if kind == "full" {
		_, f := m.place(x, c, "x", "file", nil, nil)
		f.DecRef()
	}
	return x, c
}

// renameCase tries one combination in directories of its own. With a source
// "inside", the destination's directory is in the source; with a destination
// "inside", the source is below the destination.
func (m *machine) renameCase(src, dst string, flag uint32, across bool) {
	m.t.Helper()
	label := fmt.Sprintf("%s-%s-%d-%t", src, dst, flag, across)
	top, ti := m.place(m.root, m.fs.Root(), label, "dir", nil, nil)
	defer ti.DecRef()
	od, oi := m.place(top, ti, "od", "dir", nil, nil)
	defer oi.DecRef()
	nd, ni := od, oi
	if across {
		nd, ni = m.place(top, ti, "nd", "dir", nil, nil)
		defer ni.DecRef()
	}
	s, si := m.place(od, oi, "s", src, nil, nil)
	_, di := m.place(nd, ni, "d", dst, s, si)
	oname, nname := "s", "d"
	if src == "inside" { // the new name is in what moves
		nd, ni = s, si
		ni.IncRef()
		defer ni.DecRef()
	} else if dst == "inside" { // the old name is in what is in the way
		od, oi = nd.children["d"], di
		oi.IncRef()
		defer oi.DecRef()
		_, f := m.place(od, oi, "s", "dir", nil, nil)
		f.DecRef()
	}
	for _, i := range []*Inode{si, di} {
		if i != nil {
			i.DecRef()
		}
	}
	m.tryRename(od, oi, oname, nd, ni, nname, flag)
}
