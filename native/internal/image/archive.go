package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// Annotations by which layouts name their images.
const (
	refNameAnnotation    = "org.opencontainers.image.ref.name" // a tag alone, or a whole reference
	containerdAnnotation = "io.containerd.image.name"          // a whole reference
)

// The platform that the Sentry runs.
const (
	guestOS   = "linux"
	guestArch = "amd64"
)

// source is one image found in an archive, with the names that the archive gives it.
type source struct {
	image v1.Image
	names []string
}

// openArchive finds the images in a docker-archive (`docker save`), an OCI layout directory or a tar of one; tars may be
// compressed with gzip or zstd. scratch is a directory for what must be unpacked; release frees it.
func openArchive(archive, scratch string) (images []source, release func(), err error) {
	release = func() {}
	st, err := os.Stat(archive)
	if err != nil {
		return nil, release, err
	}
	if st.IsDir() {
		images, err = openLayout(archive)
		return images, release, err
	}
	opener := func() (io.ReadCloser, error) { return openTar(archive) }
	kind, err := sniff(opener)
	if err != nil {
		return nil, release, fmt.Errorf("%s: %w", archive, err)
	}
	switch kind {
	case "manifest.json":
		images, err = openDockerArchive(opener)
	default:
		dir, err := os.MkdirTemp(scratch, "layout-")
		if err != nil {
			return nil, release, err
		}
		release = func() { _ = os.RemoveAll(dir) }
		if err := unpackLayout(opener, dir); err != nil {
			return nil, release, fmt.Errorf("%s: %w", archive, err)
		}
		images, err = openLayout(dir)
		if err != nil {
			return nil, release, fmt.Errorf("%s: %w", archive, err)
		}
		return images, release, nil
	}
	if err != nil {
		return nil, release, fmt.Errorf("%s: %w", archive, err)
	}
	return images, release, nil
}

// openTar opens a tar, decompressing it where it is compressed.
func openTar(archive string) (io.ReadCloser, error) {
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	var magic [4]byte
	n, err := io.ReadFull(f, magic[:])
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		_ = f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, err
	}
	switch {
	case n >= 2 && magic[0] == 0x1f && magic[1] == 0x8b:
		z, err := gzip.NewReader(bufio.NewReaderSize(f, 1<<20))
		if err != nil {
			_ = f.Close()
			return nil, err
		}
		return &stacked{z, []func() error{z.Close, f.Close}}, nil
	case bytes.Equal(magic[:], []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(f)
		if err != nil {
			_ = f.Close()
			return nil, err
		}
		return &stacked{z, []func() error{func() error { z.Close(); return nil }, f.Close}}, nil
	}
	return f, nil // Unwrapped: the tar reader skips by seeking.
}

// stacked is a reader on top of others, which are closed with it.
type stacked struct {
	io.Reader
	closers []func() error
}

func (s *stacked) Close() error {
	var errs []error
	for _, c := range s.closers {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// sniff tells what a tar is by the file at its root that says so: "manifest.json" of a docker-archive, which recent engines put
// beside an OCI layout, or "index.json".
func sniff(opener tarball.Opener) (string, error) {
	r, err := opener()
	if err != nil {
		return "", err
	}
	defer r.Close()
	found := ""
	for tr := tar.NewReader(r); ; {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", fmt.Errorf("not a tar archive: %w", err)
		}
		switch filepath.Clean(hdr.Name) {
		case "manifest.json":
			return "manifest.json", nil
		case "index.json":
			found = "index.json"
		}
	}
	if found == "" {
		return "", errors.New("neither a docker-archive (no manifest.json) nor an OCI layout (no index.json)")
	}
	return found, nil
}

func openDockerArchive(opener tarball.Opener) ([]source, error) {
	manifest, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, err
	}
	var out []source
	for _, d := range manifest {
		var tag *name.Tag
		if len(manifest) > 1 {
			// The library finds an image of several by one of its tags only.
			if len(d.RepoTags) == 0 {
				return nil, errors.New("one of several images has no tag")
			}
			t, err := name.NewTag(d.RepoTags[0])
			if err != nil {
				return nil, fmt.Errorf("tag %q: %w", d.RepoTags[0], err)
			}
			tag = &t
		}
		img, err := tarball.Image(opener, tag)
		if err != nil {
			return nil, err
		}
		out = append(out, source{img, normalizeNames(d.RepoTags)})
	}
	return out, nil
}

// unpackLayout writes the files of a tarred OCI layout to dir; nothing but what a layout consists of is written.
func unpackLayout(opener tarball.Opener, dir string) error {
	r, err := opener()
	if err != nil {
		return err
	}
	defer r.Close()
	for tr := tar.NewReader(r); ; {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.Clean(hdr.Name)
		wanted := name == "index.json" || name == "oci-layout" || strings.HasPrefix(name, "blobs/")
		if hdr.Typeflag != tar.TypeReg || !wanted || !filepath.IsLocal(name) {
			continue
		}
		dst := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(dst), 0o700); err != nil {
			return err
		}
		f, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, tr)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

func openLayout(dir string) ([]source, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("OCI layout: %w", err)
	}
	images, err := indexImages(index, nil)
	if err != nil {
		return nil, fmt.Errorf("OCI layout: %w", err)
	}
	if len(images) == 0 {
		return nil, fmt.Errorf("OCI layout: no image for %s/%s", guestOS, guestArch)
	}
	return images, nil
}

// indexImages returns the images for our platform, also those of nested indexes, whose names they inherit.
func indexImages(index v1.ImageIndex, inherited []string) ([]source, error) {
	m, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	var out []source
	for _, d := range m.Manifests {
		names := append([]string(nil), inherited...)
		// containerd's is the whole reference, beside which ref.name is the tag alone.
		if n := d.Annotations[containerdAnnotation]; n != "" {
			names = append(names, n)
		} else if n := d.Annotations[refNameAnnotation]; n != "" {
			names = append(names, n)
		}
		switch {
		case d.MediaType.IsIndex():
			nested, err := index.ImageIndex(d.Digest)
			if err != nil {
				return nil, err
			}
			images, err := indexImages(nested, names)
			if err != nil {
				return nil, err
			}
			out = append(out, images...)
		case d.MediaType.IsImage() || d.MediaType == types.MediaType(""):
			if p := d.Platform; p != nil && (p.OS != guestOS || p.Architecture != guestArch) {
				continue
			}
			img, err := index.Image(d.Digest)
			if err != nil {
				return nil, err
			}
			out = append(out, source{img, normalizeNames(names)})
		}
	}
	return out, nil
}

// normalizeNames brings references to the short form that docker prints: "docker.io/library/docker" is "docker:latest".
func normalizeNames(names []string) []string {
	var out []string
	for _, n := range names {
		n = strings.TrimPrefix(strings.TrimPrefix(n, "docker.io/"), "library/")
		if n == "" {
			continue
		}
		if slash := strings.LastIndexByte(n, '/'); !strings.ContainsAny(n[slash+1:], ":@") {
			n += ":latest"
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}
