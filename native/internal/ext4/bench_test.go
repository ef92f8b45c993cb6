package ext4

import (
	"fmt"
	"syscall"
	"testing"
)

// BenchmarkCreateSmallFiles is what unpacking a layer does: directories of files
// of a few KiB, with owner, times and one attribute.
func BenchmarkCreateSmallFiles(b *testing.B) {
	img := mkfsProfile(b, 8<<30)
	fs := open(b, img, Options{NoDiscard: true})
	data := make([]byte, 6000)
	var dir *Inode
	for n := range b.N {
		if n%100 == 0 {
			if dir != nil {
				dir.DecRef()
			}
			dir = mkdir(b, fs.Root(), fmt.Sprint(n))
		}
		f := mkfile(b, dir, fmt.Sprintf("file-%d", n), data)
		must(b, f.SetAttr(SetAttr{Mask: SetUID | SetMtime, UID: 1000, Mtime: Timespec{Sec: 1}}))
		f.DecRef()
	}
	b.StopTimer()
	dir.DecRef()
	must(b, fs.Close())
}

// BenchmarkCreateUnlink is metadata alone.
func BenchmarkCreateUnlink(b *testing.B) {
	img := mkfsProfile(b, 1<<30)
	fs := open(b, img, Options{NoDiscard: true})
	for n := range b.N {
		name := fmt.Sprint(n % 1000)
		f, err := fs.Root().Create(name, New{Mode: syscall.S_IFREG})
		must(b, err)
		f.DecRef()
		must(b, fs.Root().Unlink(name))
	}
	b.StopTimer()
	must(b, fs.Close())
}

// BenchmarkLookup finds a name in a directory of 1,000.
func BenchmarkLookup(b *testing.B) {
	img := mkfsProfile(b, 1<<30)
	fs := open(b, img, Options{})
	for n := range 1000 {
		f, err := fs.Root().Create(fmt.Sprint(n), New{})
		must(b, err)
		f.DecRef()
	}
	names := make([]string, 1000)
	for n := range names {
		names[n] = fmt.Sprint(n)
	}
	for b.Loop() {
		f, err := fs.Root().Lookup(names[b.N%1000])
		must(b, err)
		f.DecRef()
	}
	must(b, fs.Close())
}

// BenchmarkAppend4K appends to one file a block at a time.
func BenchmarkAppend4K(b *testing.B) {
	img := mkfsProfile(b, 8<<30)
	fs := open(b, img, Options{NoDiscard: true})
	f := mkfile(b, fs.Root(), "f", nil)
	p := make([]byte, 4096)
	b.SetBytes(4096)
	for n := range b.N {
		_, err := f.WriteAt(p, int64(n%500_000)*4096)
		must(b, err)
	}
	b.StopTimer()
	f.DecRef()
	must(b, fs.Close())
}

// BenchmarkFsync writes a block to a file and syncs it, as a database does.
func BenchmarkFsync(b *testing.B) {
	for _, durable := range []bool{false, true} {
		b.Run(map[bool]string{false: "process", true: "host"}[durable], func(b *testing.B) {
			img := mkfsProfile(b, 1<<30)
			fs := open(b, img, Options{Durable: durable})
			f := mkfile(b, fs.Root(), "f", nil)
			p := make([]byte, 4096)
			for n := 0; b.Loop(); n++ {
				_, err := f.WriteAt(p, int64(n%1000)*4096)
				must(b, err)
				must(b, f.Touch(SetMtime))
				must(b, f.Sync(false))
			}
			f.DecRef()
			must(b, fs.Close())
		})
	}
}
