package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// TestConcurrentUse has many goroutines make, move, write and remove in the same
// few directories while others sync and read. The race detector and e2fsck judge.
func TestConcurrentUse(t *testing.T) {
	img := mkfsProfile(t, 64<<20)
	fs := open(t, img, Options{CacheBytes: 1, BeforeFree: func(i *Inode, off, n int64) {
		if _, err := i.Extents(off, n, false); err != nil {
			t.Errorf("extents inside the hook: %v", err)
		}
	}})
	var dirs []*Inode
	dirs = append(dirs, fs.Root())
	for n := range 4 {
		dirs = append(dirs, mkdir(t, dirs[n/2], fmt.Sprintf("d%d", n)))
	}
	allowed := []error{syscall.EEXIST, syscall.ENOENT, syscall.EISDIR, syscall.ENOTDIR, syscall.ENOTEMPTY, syscall.EINVAL, syscall.EPERM, syscall.ENOSPC}
	check := func(err error) {
		if err == nil {
			return
		}
		for _, a := range allowed {
			if errors.Is(err, a) {
				return
			}
		}
		t.Errorf("unexpected: %v", err)
	}
	const workers, steps = 6, 1500
	var wg sync.WaitGroup
	var stop atomic.Bool
	wg.Go(func() {
		for !stop.Load() {
			check(fs.Sync())
			fs.Statfs()
			time.Sleep(time.Millisecond)
		}
	})
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), uint64(time.Now().UnixNano())))
			dir := func() *Inode { return dirs[rnd.IntN(len(dirs))] }
			name := func() string { return fmt.Sprintf("d%d", rnd.IntN(30)) }
			for range steps {
				switch rnd.IntN(12) {
				case 0, 1:
					n := New{Mode: syscall.S_IFREG}
					if rnd.IntN(3) == 0 {
						n.Mode = syscall.S_IFDIR
					}
					i, err := dir().Create(name(), n)
					check(err)
					if err == nil {
						i.DecRef()
					}
				case 2:
					check(dir().Unlink(name()))
				case 3:
					check(dir().Rmdir(name()))
				case 4, 5:
					flags := []uint32{0, RenameNoReplace, RenameExchange, RenameWhiteout}[rnd.IntN(4)]
					check(fs.Rename(dir(), name(), dir(), name(), flags))
				case 6:
					check(dir().ReadDir(0, func(Dirent) bool { return true }))
				default:
					i, err := dir().Lookup(name())
					check(err)
					if err != nil {
						continue
					}
					i.Attr()
					if i.isRegular() {
						off := rnd.Int64N(100_000)
						_, err = i.WriteAt(bytes.Repeat([]byte{byte(off)}, rnd.IntN(9000)), off)
						check(err)
						switch rnd.IntN(6) {
						case 0:
							check(i.Truncate(rnd.Int64N(100_000)))
						case 1:
							_, err := i.Extents(0, i.Size(), true)
							check(err)
						case 2:
							check(i.Fallocate(FallocPunchHole|FallocKeepSize, off, 10_000))
						case 3:
							check(i.Fallocate(0, off, 50_000))
						case 4:
							check(dir().Link(name(), i))
						case 5:
							_, err := contents(i)
							check(err)
						}
					}
					check(i.SetXattr("trusted.x", make([]byte, rnd.IntN(300)), 0))
					_, err = i.ListXattr()
					check(err)
					i.DecRef()
				}
			}
		})
	}
	work.Wait()
	stop.Store(true)
	wg.Wait()
	for _, d := range dirs[1:] {
		d.DecRef()
	}
	finish(t, fs, img)
	fs = open(t, img, Options{ReadOnly: true})
	compareTrees(t, tree(t, fs), kernelTree(t, img))
}

// TestExtentsBesideWrites: writes through the file and stores through its
// mapping, to different bytes of the same preallocated blocks, both last.
func TestExtentsBesideWrites(t *testing.T) {
	img := mkfsProfile(t, 32<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", nil)
	const blocks = 400
	must(t, f.Fallocate(0, 0, blocks*4096))
	var wg sync.WaitGroup
	wg.Go(func() {
		for b := range int64(blocks) {
			if _, err := f.WriteAt([]byte("written"), b*4096+100); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Go(func() {
		for b := range int64(blocks) {
			x, err := f.Extents(b*4096, 4096, true)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := fs.dev.WriteAt([]byte("stored"), x[0].DevOff+2000); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	want := make([]byte, 4096)
	copy(want[100:], "written")
	copy(want[2000:], "stored")
	got, err := contents(f)
	must(t, err)
	for b := range blocks {
		if !bytes.Equal(got[b*4096:(b+1)*4096], want) {
			t.Fatalf("block %d is not what was put there", b)
		}
	}
	f.DecRef()
	finish(t, fs, img)
}
