// Package sandbox runs one episode: a supervisor process that owns sockets, signals and cleaning up, and a Sentry
// process (gVisor embedded as a library) that owns the guest.
//
// The design principle: the supervisor may open sockets and files but never touches guest data structures; the Sentry
// holds the guest and may open nothing. They share a socketpair for packets, a status socket, and nothing else.
package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path"
	"strings"
)

// Schema is the version of the episode document that this binary understands.
const Schema = "gvx.episode/1"

// MaxSpecBytes bounds an episode document; a longer one is refused before it is parsed.
const MaxSpecBytes = 4 << 20

// MaxSocketPath is the longest path that fits sockaddr_un.sun_path with its terminating NUL (108 bytes, unix(7)).
const MaxSocketPath = 107

// DefaultStopGraceMillis is the time a guest has between SIGTERM and SIGKILL when the episode names none. Docker's
// `docker stop` uses the same ten seconds.
const DefaultStopGraceMillis = 10_000

// Mount kinds.
const (
	MountVolume = "volume"
	MountTmpfs  = "tmpfs"
)

// What a guest's fsync survives: a killed episode, or a lost host, too.
const (
	DurabilityProcess = "process"
	DurabilityHost    = "host"
)

// Network modes.
const (
	NetworkNAT  = "nat"
	NetworkNone = "none"
)

// Host ends of a published port.
const (
	HostUnix = "unix"
	HostTCP  = "tcp"
)

// Episode is the document that describes one run; docs/episode.md is its reference. File descriptors in it are numbers
// of descriptors that the supervisor inherits.
type Episode struct {
	Schema      string    `json:"schema"`
	ID          string    `json:"id"`
	Rootfs      Rootfs    `json:"rootfs"`
	Process     Process   `json:"process"`
	Hostname    string    `json:"hostname"`
	Resources   Resources `json:"resources"`
	Mounts      []Mount   `json:"mounts"`
	Network     Network   `json:"network"`
	LifelineFD  *int      `json:"lifeline_fd,omitempty"`
	EventsFD    *int      `json:"events_fd,omitempty"`
	RuntimeDir  string    `json:"runtime_dir"`
	StopGraceMS *int64    `json:"stop_grace_ms,omitempty"`
}

// Rootfs is the root file system: an erofs image, opened read-only.
type Rootfs struct {
	FD int `json:"fd"`
}

// Process is the guest's init process. Args[0] is looked up in PATH of Env when it has no slash.
type Process struct {
	Args     []string `json:"args"`
	Env      []string `json:"env"`
	Cwd      string   `json:"cwd"`
	User     User     `json:"user"`
	Terminal bool     `json:"terminal"`
}

// User holds numeric ids; names are resolved against the image when it is imported.
type User struct {
	UID            uint32   `json:"uid"`
	GID            uint32   `json:"gid"`
	AdditionalGIDs []uint32 `json:"additional_gids"`
}

// Resources are what the guest sees. Zero means: a default (4 GiB, the host's CPUs).
type Resources struct {
	MemoryBytes uint64 `json:"memory_bytes"`
	CPUs        int    `json:"cpus"`
}

// Mount is a volume (an ext4 image by descriptor, with BaseFD a delta over another) or a tmpfs.
type Mount struct {
	Kind        string `json:"kind"`
	FD          *int   `json:"fd,omitempty"`
	BaseFD      *int   `json:"base_fd,omitempty"`
	Destination string `json:"destination"`
	ReadOnly    bool   `json:"readonly"`
	SizeBytes   uint64 `json:"size_bytes"`
	Durability  string `json:"durability,omitempty"` // of a volume; DurabilityProcess when empty
}

// Network selects how the guest reaches the world and which of its ports the host reaches.
type Network struct {
	Mode    string    `json:"mode"`
	Publish []Publish `json:"publish"`
	// Allow lists destinations outside the default policy: "CIDR", "CIDR:port", "address:port" or "name:port".
	Allow []string `json:"allow,omitempty"`
}

// Publish forwards a host socket to a TCP port of the guest.
type Publish struct {
	Host      PublishHost `json:"host"`
	GuestPort uint16      `json:"guest_port"`
}

// PublishHost is the host's end: a unix socket path or a TCP address. TCP port 0 lets the kernel choose one; the
// "published" event tells which.
type PublishHost struct {
	Kind    string `json:"kind"`
	Path    string `json:"path,omitempty"`
	Address string `json:"address,omitempty"`
	Port    uint16 `json:"port,omitempty"`
}

// SpecError is a fault of the episode document: Field is the JSON path of what is wrong.
type SpecError struct {
	Field  string
	Reason string
}

func (e *SpecError) Error() string {
	return fmt.Sprintf("episode spec: %s: %s", e.Field, e.Reason)
}

// isName tells whether s has one to most bytes, the first a letter or digit, the others letters, digits or one of others. Not a regular
// expression: compiling one with such a count takes a quarter of a millisecond, in each process of every start.
func isName(s, others string, most int) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i, c := range []byte(s) {
		alphanumeric := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !alphanumeric && (i == 0 || strings.IndexByte(others, c) < 0) {
			return false
		}
	}
	return true
}

// ParseEpisode reads one document to EOF, rejects unknown fields, fills in defaults and validates it.
// Errors are *SpecError, or wrap the error of the reader.
func ParseEpisode(r io.Reader) (*Episode, error) {
	raw, err := io.ReadAll(io.LimitReader(r, MaxSpecBytes+1))
	if err != nil {
		return nil, fmt.Errorf("reading the episode spec: %w", err)
	}
	if len(raw) > MaxSpecBytes {
		return nil, &SpecError{"(document)", fmt.Sprintf("longer than %d bytes", MaxSpecBytes)}
	}
	// The schema is looked at first, so that a document of another version is told so and not which field is unknown.
	var head struct {
		Schema string `json:"schema"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return nil, &SpecError{"(document)", "not JSON: " + err.Error()}
	}
	if head.Schema != Schema {
		return nil, &SpecError{"schema", fmt.Sprintf("is %q, this gvx-sentry understands %q", head.Schema, Schema)}
	}
	var e Episode
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		var typeErr *json.UnmarshalTypeError
		if errors.As(err, &typeErr) {
			return nil, &SpecError{typeErr.Field, fmt.Sprintf("a JSON %s cannot be a %s", typeErr.Value, typeErr.Type)}
		}
		return nil, &SpecError{"(document)", strings.TrimPrefix(err.Error(), "json: ")}
	}
	e.applyDefaults()
	if err := e.Validate(); err != nil {
		return nil, err
	}
	return &e, nil
}

func (e *Episode) applyDefaults() {
	if e.Process.Cwd == "" {
		e.Process.Cwd = "/"
	}
	if e.Network.Mode == "" {
		e.Network.Mode = NetworkNAT
	}
	if e.Hostname == "" {
		e.Hostname = e.ID
		if len(e.Hostname) > 12 {
			e.Hostname = e.Hostname[:12] // As docker shortens a container's id.
		}
		e.Hostname = strings.Trim(strings.ReplaceAll(e.Hostname, "_", "-"), "-.")
	}
	if e.StopGraceMS == nil {
		grace := int64(DefaultStopGraceMillis)
		e.StopGraceMS = &grace
	}
}

// Validate checks everything that can be checked without touching the system. The first fault is returned.
func (e *Episode) Validate() error {
	if !isName(e.ID, "_.-", 64) {
		return &SpecError{"id", fmt.Sprintf("%q: 1 to 64 of [A-Za-z0-9_.-], beginning with a letter or digit", e.ID)}
	}
	if !isName(e.Hostname, ".-", 63) {
		return &SpecError{"hostname", fmt.Sprintf("%q is no host name", e.Hostname)}
	}
	if !path.IsAbs(e.RuntimeDir) {
		return &SpecError{"runtime_dir", "must be an absolute path"}
	}
	if *e.StopGraceMS < 0 {
		return &SpecError{"stop_grace_ms", "must not be negative"}
	}
	if e.Resources.CPUs < 0 {
		return &SpecError{"resources.cpus", "must not be negative"}
	}
	if m := e.Resources.MemoryBytes; m != 0 && m < 16<<20 {
		return &SpecError{"resources.memory_bytes", "below 16 MiB no guest starts"}
	}
	if err := e.Process.validate(); err != nil {
		return err
	}
	used := map[int]string{}
	if err := claimFD(used, "rootfs.fd", &e.Rootfs.FD); err != nil {
		return err
	}
	for _, fd := range []struct {
		field string
		fd    *int
	}{{"lifeline_fd", e.LifelineFD}, {"events_fd", e.EventsFD}} {
		if fd.fd != nil {
			if err := claimFD(used, fd.field, fd.fd); err != nil {
				return err
			}
		}
	}
	seen := map[string]bool{}
	for i := range e.Mounts {
		field := fmt.Sprintf("mounts[%d]", i)
		m := &e.Mounts[i]
		if err := m.validate(field); err != nil {
			return err
		}
		if seen[m.Destination] {
			return &SpecError{field + ".destination", m.Destination + " is mounted twice"}
		}
		seen[m.Destination] = true
		if m.Kind == MountVolume {
			if err := claimFD(used, field+".fd", m.FD); err != nil {
				return err
			}
			if m.BaseFD != nil {
				if err := claimFD(used, field+".base_fd", m.BaseFD); err != nil {
					return err
				}
			}
		}
	}
	return e.Network.validate()
}

// claimFD checks that a descriptor number is usable and named once only: a shared one would be closed twice.
func claimFD(used map[int]string, field string, fd *int) error {
	if fd == nil {
		return &SpecError{field, "missing"}
	}
	if *fd < 3 {
		return &SpecError{field, fmt.Sprintf("%d: descriptors 0, 1 and 2 are the guest's", *fd)}
	}
	if other, taken := used[*fd]; taken {
		return &SpecError{field, fmt.Sprintf("descriptor %d is already %s", *fd, other)}
	}
	used[*fd] = field
	return nil
}

func (p *Process) validate() error {
	if len(p.Args) == 0 || p.Args[0] == "" {
		return &SpecError{"process.args", "names no program"}
	}
	for i, s := range p.Args {
		if strings.ContainsRune(s, 0) {
			return &SpecError{fmt.Sprintf("process.args[%d]", i), "contains a NUL byte"}
		}
	}
	for i, s := range p.Env {
		if strings.IndexByte(s, '=') < 1 || strings.ContainsRune(s, 0) {
			return &SpecError{fmt.Sprintf("process.env[%d]", i), fmt.Sprintf("%q is not KEY=VALUE", s)}
		}
	}
	if !path.IsAbs(p.Cwd) {
		return &SpecError{"process.cwd", fmt.Sprintf("%q is not absolute", p.Cwd)}
	}
	if p.Terminal {
		return &SpecError{"process.terminal", "terminals are not supported yet"}
	}
	return nil
}

func (m *Mount) validate(field string) error {
	if !path.IsAbs(m.Destination) || path.Clean(m.Destination) != m.Destination || m.Destination == "/" {
		return &SpecError{field + ".destination", fmt.Sprintf("%q: an absolute, clean path other than / is needed", m.Destination)}
	}
	switch m.Kind {
	case MountVolume:
		if m.SizeBytes != 0 {
			return &SpecError{field + ".size_bytes", "belongs to a tmpfs, a volume has its own size"}
		}
		if d := m.Durability; d != "" && d != DurabilityProcess && d != DurabilityHost {
			return &SpecError{field + ".durability", fmt.Sprintf("%q is neither %q nor %q", d, DurabilityProcess, DurabilityHost)}
		}
	case MountTmpfs:
		if m.FD != nil {
			return &SpecError{field + ".fd", "a tmpfs has none"}
		}
		if m.BaseFD != nil {
			return &SpecError{field + ".base_fd", "a tmpfs has none"}
		}
		if m.Durability != "" {
			return &SpecError{field + ".durability", "a tmpfs has none"}
		}
	default:
		return &SpecError{field + ".kind", fmt.Sprintf("%q is neither %q nor %q", m.Kind, MountVolume, MountTmpfs)}
	}
	return nil
}

func (n *Network) validate() error {
	switch n.Mode {
	case NetworkNAT:
	case NetworkNone:
		if len(n.Publish) > 0 {
			return &SpecError{"network.publish", `a published port needs network mode "nat"`}
		}
		if len(n.Allow) > 0 {
			return &SpecError{"network.allow", `an allowed destination needs network mode "nat"`}
		}
	default:
		return &SpecError{"network.mode", fmt.Sprintf("%q is neither %q nor %q", n.Mode, NetworkNAT, NetworkNone)}
	}
	for i, p := range n.Publish {
		field := fmt.Sprintf("network.publish[%d]", i)
		if p.GuestPort == 0 {
			return &SpecError{field + ".guest_port", "must be 1 to 65535"}
		}
		switch p.Host.Kind {
		case HostUnix:
			if !path.IsAbs(p.Host.Path) {
				return &SpecError{field + ".host.path", fmt.Sprintf("%q is not absolute", p.Host.Path)}
			}
			if len(p.Host.Path) > MaxSocketPath {
				return &SpecError{field + ".host.path", fmt.Sprintf("%d bytes; a unix socket's path may have at most %d (clients could not reach it)", len(p.Host.Path), MaxSocketPath)}
			}
			if p.Host.Address != "" || p.Host.Port != 0 {
				return &SpecError{field + ".host", "a unix socket has a path only"}
			}
		case HostTCP:
			if net.ParseIP(p.Host.Address) == nil {
				return &SpecError{field + ".host.address", fmt.Sprintf("%q is no IP address", p.Host.Address)}
			}
			if p.Host.Path != "" {
				return &SpecError{field + ".host.path", "a tcp address has none"}
			}
		default:
			return &SpecError{field + ".host.kind", fmt.Sprintf("%q is neither %q nor %q", p.Host.Kind, HostUnix, HostTCP)}
		}
	}
	return nil
}
