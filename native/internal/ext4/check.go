package ext4

import "fmt"

// Check walks everything reachable and says what does not add up: blocks owned
// twice or not marked, blocks and inodes marked and owned by nothing, link
// counts, parents, i_blocks, free counts. It is a judge for tests, beside
// e2fsck. Nobody may use the volume meanwhile. Volumes of features that are not
// written are not judged (see ReadOnlyReason).
func (fs *FS) Check() []error {
	if fs.readOnlyBy != "" {
		return nil
	}
	c := &checker{
		fs:     fs,
		blocks: make([]byte, (fs.sb.blocksCount/8+8)&^7),
		names:  map[uint32]int{},
		links:  map[uint32]int{},
		seen:   map[uint32]bool{},
		xattrs: map[uint64]uint32{},
	}
	c.layout()
	c.inode(fs.root)
	c.tree(fs.root)
	fs.orphanMu.Lock()
	for i := fs.orphans; i != nil; i = i.nextOrphan {
		c.inode(i)
	}
	fs.orphanMu.Unlock()
	c.internal()
	for ino, links := range c.links {
		if ino != rootIno && links != c.names[ino] {
			c.say("inode %d: %d links, %d names", ino, links, c.names[ino])
		}
	}
	fs.alloc.mu.Lock()
	defer fs.alloc.mu.Unlock()
	for _, g := range fs.groups {
		c.group(g)
	}
	return c.problems
}

type checker struct {
	fs       *FS
	problems []error
	blocks   []byte         // bitmap of blocks with an owner
	names    map[uint32]int // names found of inodes that are not directories
	links    map[uint32]int // what those inodes say
	seen     map[uint32]bool
	xattrs   map[uint64]uint32 // users of xattr blocks
}

func (c *checker) say(format string, args ...any) {
	if len(c.problems) < 100 {
		c.problems = append(c.problems, fmt.Errorf("ext4: check: "+format, args...))
	}
}

// own marks blocks as owned.
func (c *checker) own(blk, n uint64, ino uint32) {
	for b := blk; b < blk+n; b++ {
		k := b - c.fs.sb.firstDataBlock
		if b >= c.fs.sb.blocksCount || testBit(c.blocks, uint32(k)) {
			c.say("inode %d: block %d is outside or belongs to something else too", ino, b)
			return
		}
		setBits(c.blocks, uint32(k), 1, true)
	}
}

// layout owns what groups themselves take.
func (c *checker) layout() {
	for _, g := range c.fs.groups {
		c.own(c.fs.sb.groupStart(g.num), uint64(c.fs.sb.baseMeta(g.num)), 0)
		c.own(g.blockBitmap, 1, 0)
		c.own(g.inodeBitmap, 1, 0)
		c.own(g.inodeTable, c.fs.sb.inodeTableBlocks(), 0)
	}
}

// node owns the blocks of an extent tree and counts them.
func (c *checker) node(i *Inode, b []byte, depth int) (n uint64) {
	for k := range nodeEntries(b) {
		if depth == 0 {
			e := getExtent(entry(b, k))
			c.own(e.phys, uint64(e.n), i.ino)
			n += uint64(e.n)
			if size := uint64(i.size()); !e.unwritten && i.isRegular() && e.end() > (size+uint64(c.fs.sb.blockSize)-1)>>c.fs.sb.blockBits && !i.pastEnd {
				c.say("inode %d: written blocks behind the end of file", i.ino)
			}
			continue
		}
		first, blk := getIndex(entry(b, k))
		c.own(blk, 1, i.ino)
		child, err := i.readNode(blk, depth-1, first)
		if err != nil {
			c.say("%w", err)
			continue
		}
		if le.Uint32(entry(child, 0)) != first {
			c.say("inode %d: index of %d over a node that starts at %d", i.ino, first, le.Uint32(entry(child, 0)))
		}
		n += 1 + c.node(i, child, depth-1)
	}
	return n
}

// inode checks one inode by itself.
func (c *checker) inode(i *Inode) {
	c.seen[i.ino] = true
	i.mu.RLock()
	defer i.mu.RUnlock()
	if !i.isDir() {
		c.links[i.ino] = int(i.links())
	}
	n := uint64(0)
	if i.hasExtents() {
		n = c.node(i, i.root(), nodeDepth(i.root()))
	}
	if blk := i.fileACL(); blk != 0 {
		n++
		if c.xattrs[blk]++; c.xattrs[blk] == 1 {
			c.own(blk, 1, i.ino)
		}
		if _, err := i.blockXattrs(); err != nil {
			c.say("%w", err)
		}
	}
	if _, err := i.bodyXattrs(); err != nil {
		c.say("%w", err)
	}
	if want := n << (c.fs.sb.blockBits - 9); i.sectors() != want && (i.hasExtents() || n > 0) {
		c.say("inode %d: i_blocks is %d, counted %d", i.ino, i.sectors(), want)
	}
	if used, err := c.fs.inodeUsed(i.ino); err != nil || !used {
		c.say("inode %d: in use and not marked (%v)", i.ino, err)
	}
}

// tree checks a directory and all below it.
func (c *checker) tree(d *Inode) {
	subdirs := 0
	var list []Dirent
	if err := d.ReadDir(0, func(e Dirent) bool { list = append(list, e); return true }); err != nil {
		c.say("directory %d: %w", d.ino, err)
		return
	}
	for _, e := range list {
		i, err := d.Lookup(e.Name)
		if err != nil {
			c.say("directory %d: %q: %w", d.ino, e.Name, err)
			continue
		}
		if e.Type != TypeUnknown && e.Type != i.direntType() {
			c.say("directory %d: %q is of type %d, inode %d of type %d", d.ino, e.Name, e.Type, i.ino, i.direntType())
		}
		again := c.seen[i.ino]
		if !again {
			c.inode(i)
		} else if i.isDir() {
			c.say("directory %d has two names", i.ino)
		}
		if i.isDir() && !again {
			subdirs++
			if up, err := i.Parent(); err != nil || up != d.ino {
				c.say("directory %d: parent is %d, not %d (%v)", i.ino, up, d.ino, err)
			}
			c.tree(i)
		} else {
			c.names[i.ino]++
		}
		i.DecRef()
	}
	if n := int(d.Attr().Nlink); n != subdirs+2 && (n != 1 || !c.fs.sb.has(roCompatDirNlink)) {
		c.say("directory %d: %d links, has %d subdirectories", d.ino, n, subdirs)
	}
}

// internal checks the inodes that have no name: journal, room for descriptors,
// orphan file.
func (c *checker) internal() {
	fs := c.fs
	list := []uint32{}
	for ino := uint32(1); ino < fs.sb.firstIno; ino++ {
		if ino != rootIno {
			list = append(list, ino)
		}
	}
	raw := fs.superB.data[fs.superAt:]
	if f := le.Uint32(raw[sOrphanFile:]); fs.sb.compat&compatOrphanFile != 0 && fs.validIno(f) && !c.seen[f] {
		list = append(list, f)
	}
	for _, ino := range list {
		i := fs.newHandle(ino)
		if i.read() != nil { // not in use: no links
			c.seen[ino] = true
			continue
		}
		if ino == resizeIno && fs.sb.compat&compatResizeInode != 0 {
			// Its blocks are the groups' own but for the one that lists them.
			c.own(uint64(le.Uint32(i.root()[4*13:])), 1, ino)
			c.seen[ino] = true
			continue
		}
		c.inode(i)
		delete(c.links, ino)
	}
}

// group compares bitmaps and counts of a group. alloc.mu is held.
func (c *checker) group(g *group) {
	fs := c.fs
	n := fs.sb.groupBlocks(g.num)
	want := make([]byte, fs.sb.blockSize)
	copy(want, c.blocks[uint64(g.num)*uint64(fs.sb.blocksPerGroup)/8:])
	setBits(want, n, uint32(fs.sb.blockSize*8)-n, true)
	if free := countClear(want, n); free != g.free {
		c.say("group %d: %d blocks free, counted %d", g.num, g.free, free)
	}
	if g.flags&bgBlockUninit == 0 {
		if err := fs.loadBlockBitmap(g); err != nil {
			c.say("%w", err)
			return
		}
		for b := range n {
			if testBit(want, b) != testBit(g.blocks.data, b) {
				c.say("group %d: block %d: owned %t, marked %t", g.num, fs.sb.groupStart(g.num)+uint64(b), testBit(want, b), testBit(g.blocks.data, b))
			}
		}
	}
	used := uint32(0)
	for k := range fs.sb.inodesPerGroup {
		if c.seen[g.num*fs.sb.inodesPerGroup+k+1] {
			used++
		}
	}
	if free := fs.sb.inodesPerGroup - used; free != g.freeInodes {
		c.say("group %d: %d inodes free, counted %d", g.num, g.freeInodes, free)
	}
}
