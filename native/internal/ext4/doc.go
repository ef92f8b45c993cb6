// Package ext4 reads and writes ext4 volumes on a blockdev.Device.
//
// # Design
//
// The volume is exclusively ours while it is open, so everything may be cached
// for ever. Nothing here knows gVisor: sentryfs is the glue. A mask of supported
// features gates opening (feature.go): what cannot be written safely opens
// read-only, what cannot be read is refused by name. A volume that is not clean
// is refused for writing: replay and repair are ext4lite's.
//
// Metadata goes through one cache of blocks (buffer.go), and every change of it
// through a handle (journal.go), which belongs to one of jbd2's transactions. What
// may take more blocks than a transaction holds (cutting and deleting files) goes in
// steps, with the inode in the orphan list between them. RECOVER is set in the
// superblock while the volume is open. On a volume without a journal changed blocks
// stay in memory until Sync, Close, or too many of them; s_state says unclean
// meanwhile. Checksums of all kinds are verified when a block is read and set when
// it is changed; those of bitmaps and descriptors, and the superblock's counts, when
// a transaction ends. Structures are checked for bounds where they are read: damage
// gives EUCLEAN, and together with EIO stops all further writing.
//
// Data does not pass through the cache: a file's bytes are read and written at
// their place on the device, and Extents tells where that is, so that the host's
// page cache is the only one. New blocks are reserved in memory, filled, and only
// then mapped (alloc.go, data.go): nobody ever sees what was in them before, a
// failure leaves nothing to undo, and no transaction refers to data that are not on
// the device. Freed blocks stay reserved until the transaction is committed.
//
// An inode is a copy of its 256 bytes (inode.go), stored into its table block at
// every change. Its extent tree (extent.go) is walked in the cached blocks. A
// directory that is used is held whole as a map (dir.go); its htree (htree.go) is
// maintained, but looked at only to insert.
//
// # Locks
//
// In the order in which they are taken:
//
//	FS.renameMu    serialises renames; the parent of a directory changes under it only
//	Inode.io       exclusively by what changes data or size, shared by ReadAt
//	jbd2           shared by handles, exclusively by a commit for a moment (FS.barrier
//	               without a journal); Begin may wait for a commit or a checkpoint
//	FS.orphanMu    the orphan list; inodes lose or regain their last link under it
//	Inode.mu       everything in memory of one inode; a directory's before its children's
//	FS.xattrMu     reference counts of shared attribute blocks
//	FS.sbMu        the superblock
//	allocator.mu   bitmaps, counts, reservations
//	FS.icMu, bufferCache.mu, FS.failMu: leaves
//
// No lock but Inode.io is held while data moves or hooks run.
package ext4
