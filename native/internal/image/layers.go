package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Names with a meaning in layers: https://github.com/opencontainers/image-spec/blob/main/layer.md, "Whiteouts".
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."     // names that only AUFS itself used
	whiteoutOpaque = ".wh..wh..opq" // everything of lower layers in this directory is gone
	xattrRecord    = "SCHILY.xattr."
	maxSymlinks    = 40 // as in Linux
)

// builder applies layers, lowest first, to a tree.
type builder struct {
	w     *erofsWriter
	root  *node
	layer int
}

func newBuilder(w *erofsWriter) *builder {
	return &builder{w: w, root: &node{mode: unix.S_IFDIR | 0o755, nlink: 2, children: map[string]*node{}}}
}

// apply reads one layer, an uncompressed tar stream, to its end.
func (b *builder) apply(r io.Reader) error {
	b.layer++
	tr := tar.NewReader(r)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("layer %d: %w", b.layer, err)
		}
		if err := b.entry(hdr, tr); err != nil {
			return fmt.Errorf("layer %d: %q: %w", b.layer, hdr.Name, err)
		}
	}
}

// entry applies one header of a layer.
func (b *builder) entry(hdr *tar.Header, data io.Reader) error {
	name := path.Clean("/" + hdr.Name)
	for part := range strings.SplitSeq(hdr.Name, "/") {
		if part == ".." {
			return errors.New("the name leaves the layer's root")
		}
	}
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if name == "/" {
		if hdr.Typeflag != tar.TypeDir {
			return errors.New("the root is no directory")
		}
		return b.setMeta(b.root, hdr)
	}
	dir, err := b.directory(path.Dir(name), true)
	if err != nil {
		return err
	}
	base := path.Base(name)
	switch {
	case base == whiteoutOpaque:
		return b.removeLower(dir)
	case strings.HasPrefix(base, whiteoutMeta):
		return nil
	case strings.HasPrefix(base, whiteoutPrefix):
		return b.remove(dir, base[len(whiteoutPrefix):])
	}

	old := dir.children[base]
	if hdr.Typeflag == tar.TypeLink {
		target, err := b.lookup(path.Clean("/" + hdr.Linkname))
		if err != nil {
			return fmt.Errorf("hard link to %q: %w", hdr.Linkname, err)
		}
		if target.isDir() {
			return fmt.Errorf("hard link to the directory %q", hdr.Linkname)
		}
		if target == old {
			return nil
		}
		if err := b.remove(dir, base); err != nil {
			return err
		}
		target.nlink++
		target.layer = b.layer
		dir.children[base] = target
		return nil
	}
	if hdr.Typeflag == tar.TypeDir && old != nil && old.isDir() {
		old.layer = b.layer
		return b.setMeta(old, hdr)
	}
	n, err := b.makeNode(hdr, data)
	if err != nil {
		return err
	}
	if err := b.remove(dir, base); err != nil {
		return err
	}
	dir.children[base] = n
	return nil
}

// makeNode makes the inode of a header that is no hard link, and stores its data.
func (b *builder) makeNode(hdr *tar.Header, data io.Reader) (*node, error) {
	n := &node{nlink: 1, layer: b.layer}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		n.mode = unix.S_IFREG
		n.size = hdr.Size
		var err error
		if n.block, err = b.w.appendData(data, hdr.Size); err != nil {
			return nil, err
		}
	case tar.TypeDir:
		n.mode = unix.S_IFDIR
		n.children = map[string]*node{}
	case tar.TypeSymlink:
		if hdr.Linkname == "" || len(hdr.Linkname) >= unix.PathMax {
			return nil, fmt.Errorf("symbolic link with a target of %d bytes", len(hdr.Linkname))
		}
		n.mode = unix.S_IFLNK
		n.target = hdr.Linkname
	case tar.TypeChar:
		n.mode = unix.S_IFCHR
		n.rdev = encodeDevice(uint32(hdr.Devmajor), uint32(hdr.Devminor))
	case tar.TypeBlock:
		n.mode = unix.S_IFBLK
		n.rdev = encodeDevice(uint32(hdr.Devmajor), uint32(hdr.Devminor))
	case tar.TypeFifo:
		n.mode = unix.S_IFIFO
	default:
		return nil, fmt.Errorf("entry of the unknown type %q", hdr.Typeflag)
	}
	return n, b.setMeta(n, hdr)
}

// setMeta takes owner, permissions, time and extended attributes from a header.
func (b *builder) setMeta(n *node, hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) > 1<<32-1 || int64(hdr.Gid) > 1<<32-1 {
		return fmt.Errorf("owner %d:%d does not fit 32 bits", hdr.Uid, hdr.Gid)
	}
	n.mode = n.mode&unix.S_IFMT | uint32(hdr.Mode)&0o7777
	if n.mode&unix.S_IFMT == unix.S_IFLNK {
		n.mode = unix.S_IFLNK | 0o777
	}
	n.uid, n.gid = uint32(hdr.Uid), uint32(hdr.Gid)
	if !hdr.ModTime.IsZero() {
		n.mtime, n.mtimeNS = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	}
	n.xattrs = nil
	for key, value := range hdr.PAXRecords {
		if name, ok := strings.CutPrefix(key, xattrRecord); ok {
			if n.xattrs == nil {
				n.xattrs = map[string]string{}
			}
			n.xattrs[name] = value
		}
	}
	return nil
}

// remove drops a name with everything below it; one that does not exist is no error.
func (b *builder) remove(dir *node, name string) error {
	n := dir.children[name]
	if n == nil {
		return nil
	}
	delete(dir.children, name)
	return b.release(n)
}

// release drops one name's hold on an inode.
func (b *builder) release(n *node) error {
	if n.isDir() {
		for name := range n.children {
			if err := b.remove(n, name); err != nil {
				return err
			}
		}
		return nil
	}
	if n.nlink--; n.nlink == 0 && n.mode&unix.S_IFMT == unix.S_IFREG {
		return b.w.discard(n)
	}
	return nil
}

// removeLower drops what lower layers put into an opaque directory and keeps what this layer did, in whichever order they come.
func (b *builder) removeLower(dir *node) error {
	for name, n := range dir.children {
		var err error
		switch {
		case n.layer != b.layer:
			err = b.remove(dir, name)
		case n.isDir():
			err = b.removeLower(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// directory finds a directory, following symbolic links of the tree as an unpacking process in a chroot would. With create
// it makes what is missing and notes that this layer has been there.
func (b *builder) directory(name string, create bool) (*node, error) {
	n, links := b.root, 0
	parts := splitPath(name)
	var trail []*node // from the root to n, for ".."
	for len(parts) > 0 {
		part := parts[0]
		parts = parts[1:]
		if part == ".." {
			if len(trail) > 0 {
				n, trail = trail[len(trail)-1], trail[:len(trail)-1]
			}
			continue
		}
		c := n.children[part]
		switch {
		case c == nil && !create:
			return nil, errNotExist
		case c == nil:
			c = &node{mode: unix.S_IFDIR | 0o755, children: map[string]*node{}, nlink: 1}
			n.children[part] = c
		case c.mode&unix.S_IFMT == unix.S_IFLNK:
			if links++; links > maxSymlinks {
				return nil, errors.New("too many symbolic links")
			}
			if strings.HasPrefix(c.target, "/") {
				n, trail = b.root, nil
			}
			parts = append(splitPath(c.target), parts...)
			continue
		case !c.isDir():
			return nil, fmt.Errorf("%q is no directory", part)
		}
		if create {
			c.layer = b.layer
		}
		trail = append(trail, n)
		n = c
	}
	return n, nil
}

var errNotExist = errors.New("does not exist")

// lookup finds a name; symbolic links in its directories are followed, the last component's is not.
func (b *builder) lookup(name string) (*node, error) {
	if name == "/" {
		return b.root, nil
	}
	dir, err := b.directory(path.Dir(name), false)
	if err != nil {
		return nil, err
	}
	if n := dir.children[path.Base(name)]; n != nil {
		return n, nil
	}
	return nil, errNotExist
}

// splitPath returns the components of a path, ".." among them, "." not.
func splitPath(name string) []string {
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		if part != "" && part != "." {
			parts = append(parts, part)
		}
	}
	return parts
}
