package image

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// This file writes EROFS images. Names and layout follow the kernel's documentation (Documentation/filesystems/erofs.rst)
// and https://erofs.docs.kernel.org/en/latest/core_ondisk.html.
//
// go-erofs, whose reader is a judge in the tests, cannot write what a guest needs: it puts the data of small regular files into their
// inodes, which the Sentry refuses to map (an executable or a shared library of less than 4 KiB would not start); it knows no hard
// links; and it copies all data by way of a spool file. Here file data goes to its final place while a layer is read, and
// metadata follows at the end:
//
//	block 0            superblock at byte 1024
//	block 1 ...        data of regular files, each at a block boundary; then directories and links that do not fit their inodes
//	meta_blkaddr ...   inodes with xattrs, small directories and link targets; root first
const (
	blockSize       = 4096
	blockBits       = 12
	superOffset     = 1024
	superSize       = 128
	superMagic      = 0xe0f5e1e2
	featureChecksum = 0x1 // compat: the superblock's block has a crc32c

	inodeSize  = 64 // extended
	slotSize   = 32 // a nid counts slots
	direntSize = 12
	// firstInode leaves nids 0 and 1 unused: an inode number of 0 means "deleted entry" to readers of directories.
	firstInode = 2 * slotSize

	layoutPlain  = 0
	layoutInline = 2

	xattrHeaderSize = 12
	xattrEntrySize  = 4
)

// xattrPrefixes are the namespaces that EROFS abbreviates, longest first where one is another's prefix.
var xattrPrefixes = []struct {
	index  byte
	prefix string
	whole  bool // the prefix is the whole name
}{
	{1, "user.", false},
	{2, "system.posix_acl_access", true},
	{3, "system.posix_acl_default", true},
	{4, "trusted.", false},
	{6, "security.", false},
}

// node is one inode of the tree that becomes the image.
type node struct {
	mode     uint32 // S_IFMT and the 12 permission bits
	uid, gid uint32
	mtime    int64
	mtimeNS  uint32
	rdev     uint32
	nlink    uint32
	xattrs   map[string]string
	children map[string]*node // directories
	target   string           // symbolic links
	size     int64            // regular files
	block    uint32           // first block of the data

	// layer is the number of the layer that last named this node, or something below it.
	layer int

	// Set by plan.
	planned bool
	nid     uint64
	ino     uint32
	data    []byte // contents of directories and links, made when the nids are known
	dataLen int
	inline  bool
	xattr   []byte
}

func (n *node) isDir() bool { return n.mode&unix.S_IFMT == unix.S_IFDIR }

// payload is the length of what the writer itself has to place: directories and symbolic links.
func (n *node) payload() int {
	switch n.mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return direntsLen(n.names())
	case unix.S_IFLNK:
		return len(n.target)
	}
	return 0
}

// names returns the sorted entries of a directory, "." and ".." among them, as a reader's binary search expects them.
func (n *node) names() []string {
	names := make([]string, 0, len(n.children)+2)
	names = append(names, ".", "..")
	for name := range n.children {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// erofsWriter appends data to an image and finishes it with metadata.
type erofsWriter struct {
	f         *os.File
	buf       *bufio.Writer
	next      uint32 // the next free block
	zero      [blockSize]byte
	copyBuf   []byte
	timestamp int64
}

func newErofsWriter(f *os.File, timestamp int64) (*erofsWriter, error) {
	w := &erofsWriter{f: f, buf: bufio.NewWriterSize(f, 1<<20), next: 1, copyBuf: make([]byte, 256<<10), timestamp: timestamp}
	_, err := w.buf.Write(w.zero[:]) // The superblock's block, filled in at the end.
	return w, err
}

// appendData copies exactly size bytes of r to fresh blocks and returns the first one's address.
func (w *erofsWriter) appendData(r io.Reader, size int64) (uint32, error) {
	if size == 0 {
		return 0, nil
	}
	blocks := (size + blockSize - 1) / blockSize
	if int64(w.next)+blocks > 1<<32-1 {
		return 0, errors.New("the image exceeds the 16 TiB that EROFS addresses")
	}
	first := w.next
	// The wrapper hides ReadFrom, which would bypass copyBuf.
	n, err := io.CopyBuffer(struct{ io.Writer }{w.buf}, io.LimitReader(r, size), w.copyBuf)
	if err != nil {
		return 0, err
	}
	if n != size {
		return 0, io.ErrUnexpectedEOF
	}
	if tail := size % blockSize; tail != 0 {
		if _, err := w.buf.Write(w.zero[tail:]); err != nil {
			return 0, err
		}
	}
	w.next += uint32(blocks)
	return first, nil
}

// discard gives the blocks of a file that a later layer removed back to the host.
func (w *erofsWriter) discard(n *node) error {
	if n.size == 0 {
		return nil
	}
	if err := w.buf.Flush(); err != nil {
		return err
	}
	length := (n.size + blockSize - 1) / blockSize * blockSize
	err := unix.Fallocate(int(w.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(n.block)*blockSize, length)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // The blocks stay, unreferenced.
	}
	return err
}

// finish writes the metadata of the tree and the superblock.
func (w *erofsWriter) finish(root *node) error {
	nodes, metaLen, err := w.plan(root)
	if err != nil {
		return err
	}
	var fill func(n, parent *node)
	fill = func(n, parent *node) {
		if n.isDir() {
			n.data = encodeDirents(n, parent)
			for _, c := range n.children {
				if c.isDir() {
					fill(c, n)
				}
			}
		}
	}
	fill(root, root)
	for _, n := range nodes {
		if n.mode&unix.S_IFMT == unix.S_IFLNK {
			n.data = []byte(n.target)
		}
		if n.data != nil && !n.inline {
			if n.block, err = w.appendData(strings.NewReader(string(n.data)), int64(len(n.data))); err != nil {
				return err
			}
		}
	}
	metaBlock := w.next
	meta := make([]byte, (metaLen+blockSize-1)/blockSize*blockSize)
	for _, n := range nodes {
		n.encode(meta[n.nid*slotSize:])
	}
	if _, err := w.buf.Write(meta); err != nil {
		return err
	}
	w.next += uint32(len(meta) / blockSize)
	if err := w.buf.Flush(); err != nil {
		return err
	}
	_, err = w.f.WriteAt(w.superblock(root.nid, uint64(len(nodes)), metaBlock), 0)
	return err
}

// plan numbers every inode once, however many names it has, in depth-first order so that what is read together lies together.
// It returns the inodes in the order of their places, and the metadata's length in bytes.
func (w *erofsWriter) plan(root *node) ([]*node, int, error) {
	var nodes []*node
	offset := firstInode
	var visit func(n *node, name string) error
	visit = func(n *node, name string) error {
		if n.planned {
			return nil
		}
		n.planned = true
		xattr, err := encodeXattrs(n.xattrs)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		n.xattr = xattr
		n.dataLen = n.payload()
		size := inodeSize + len(xattr)
		// Inline data must not cross a block boundary; an inode that ends within its block is also easiest on readers.
		if n.inline = n.dataLen > 0 && size+n.dataLen <= blockSize; n.inline {
			size += n.dataLen
		}
		if room := blockSize - offset%blockSize; size > room && (size <= blockSize || room < inodeSize) {
			offset += room
		}
		n.nid = uint64(offset / slotSize)
		n.ino = uint32(len(nodes) + 1)
		offset += (size + slotSize - 1) / slotSize * slotSize
		nodes = append(nodes, n)
		if n.isDir() {
			n.nlink = 2
			for _, child := range n.names() {
				c, ok := n.children[child]
				if !ok {
					continue // "." and ".."
				}
				if c.isDir() {
					n.nlink++
				}
				if err := visit(c, name+"/"+child); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := visit(root, ""); err != nil {
		return nil, 0, err
	}
	return nodes, offset, nil
}

// encode serializes the inode, its xattrs and inline data into b.
func (n *node) encode(b []byte) {
	le := binary.LittleEndian
	layout := uint16(layoutPlain)
	if n.inline {
		layout = layoutInline
	}
	size := uint64(n.size)
	if n.data != nil {
		size = uint64(len(n.data))
	}
	union := n.block
	switch n.mode & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFSOCK:
		union = n.rdev
	}
	le.PutUint16(b[0:], 1|layout<<1) // extended inode
	if len(n.xattr) > 0 {
		le.PutUint16(b[2:], uint16((len(n.xattr)-xattrHeaderSize)/xattrEntrySize+1))
	}
	le.PutUint16(b[4:], uint16(n.mode))
	le.PutUint64(b[8:], size)
	le.PutUint32(b[16:], union)
	le.PutUint32(b[20:], n.ino)
	le.PutUint32(b[24:], n.uid)
	le.PutUint32(b[28:], n.gid)
	le.PutUint64(b[32:], uint64(n.mtime))
	le.PutUint32(b[40:], n.mtimeNS)
	le.PutUint32(b[44:], n.nlink)
	copy(b[inodeSize:], n.xattr)
	if n.inline {
		copy(b[inodeSize+len(n.xattr):], n.data)
	}
}

// encodeXattrs returns the inline xattr area, or nil for none.
func encodeXattrs(xattrs map[string]string) ([]byte, error) {
	if len(xattrs) == 0 {
		return nil, nil
	}
	names := make([]string, 0, len(xattrs))
	for name := range xattrs {
		names = append(names, name)
	}
	sort.Strings(names)
	out := make([]byte, xattrHeaderSize)
	for _, name := range names {
		value := xattrs[name]
		index, rest := byte(0), ""
		for _, p := range xattrPrefixes {
			if p.whole && name == p.prefix {
				index = p.index
			} else if !p.whole && strings.HasPrefix(name, p.prefix) && len(name) > len(p.prefix) {
				index, rest = p.index, name[len(p.prefix):]
			}
		}
		if index == 0 {
			return nil, fmt.Errorf("extended attribute %q is in no namespace that EROFS stores", name)
		}
		if len(rest) > 255 || len(value) > 1<<16-1 {
			return nil, fmt.Errorf("extended attribute %q: name or value too long", name)
		}
		out = append(out, byte(len(rest)), index)
		out = binary.LittleEndian.AppendUint16(out, uint16(len(value)))
		out = append(out, rest...)
		out = append(out, value...)
		for len(out)%xattrEntrySize != 0 {
			out = append(out, 0)
		}
	}
	if (len(out)-xattrHeaderSize)/xattrEntrySize+1 > 1<<16-1 {
		return nil, errors.New("extended attributes exceed the 256 KiB that an inode holds")
	}
	return out, nil
}

// direntBlocks cuts sorted names into blocks: it calls fn with the names of each, and the block's used length.
func direntBlocks(names []string, fn func(names []string, used int)) {
	start, used := 0, 0
	for i, name := range names {
		need := direntSize + len(name)
		if used+need > blockSize {
			fn(names[start:i], used)
			start, used = i, 0
		}
		used += need
	}
	fn(names[start:], used)
}

// direntsLen is the size of a directory: every block but the last is full.
func direntsLen(names []string) int {
	blocks, last := 0, 0
	direntBlocks(names, func(_ []string, used int) { blocks++; last = used })
	return (blocks-1)*blockSize + last
}

// encodeDirents serializes a directory whose children have their nids.
func encodeDirents(n, parent *node) []byte {
	out := make([]byte, 0, n.dataLen)
	direntBlocks(n.names(), func(names []string, used int) {
		for len(out)%blockSize != 0 {
			out = append(out, 0) // The rest of the block before.
		}
		nameOff := direntSize * len(names)
		for _, name := range names {
			c := n.children[name]
			switch name {
			case ".":
				c = n
			case "..":
				c = parent
			}
			out = binary.LittleEndian.AppendUint64(out, c.nid)
			out = binary.LittleEndian.AppendUint16(out, uint16(nameOff))
			out = append(out, c.fileType(), 0)
			nameOff += len(name)
		}
		for _, name := range names {
			out = append(out, name...)
		}
	})
	return out
}

// fileType is the type in a directory entry (the FT_ constants of Linux).
func (n *node) fileType() byte {
	switch n.mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 1
	case unix.S_IFDIR:
		return 2
	case unix.S_IFCHR:
		return 3
	case unix.S_IFBLK:
		return 4
	case unix.S_IFIFO:
		return 5
	case unix.S_IFSOCK:
		return 6
	case unix.S_IFLNK:
		return 7
	}
	return 0
}

// superblock returns block 0.
func (w *erofsWriter) superblock(root, inodes uint64, metaBlock uint32) []byte {
	block := make([]byte, blockSize)
	b := block[superOffset : superOffset+superSize]
	le := binary.LittleEndian
	le.PutUint32(b[0:], superMagic)
	le.PutUint32(b[8:], featureChecksum)
	b[12] = blockBits
	le.PutUint16(b[14:], uint16(root))
	le.PutUint64(b[16:], inodes)
	le.PutUint64(b[24:], uint64(w.timestamp))
	le.PutUint32(b[36:], w.next)
	le.PutUint32(b[40:], metaBlock)
	// crc32c without the final inversion, over the rest of the block with the checksum field zero.
	le.PutUint32(b[4:], ^crc32.Checksum(block[superOffset:], crc32.MakeTable(crc32.Castagnoli)))
	return block
}

// Check tells whether a descriptor holds an EROFS image, by its magic number: the Sentry's own answer to another file is
// "invalid argument".
func Check(fd int) error {
	var magic [4]byte
	if _, err := unix.Pread(fd, magic[:], superOffset); err != nil {
		return fmt.Errorf("reading the EROFS superblock: %w", err)
	}
	if binary.LittleEndian.Uint32(magic[:]) != superMagic {
		return errors.New("not an EROFS image")
	}
	return nil
}

// encodeDevice is the kernel's new_encode_dev, the form in which EROFS keeps device numbers.
func encodeDevice(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | (minor&^0xff)<<12
}
