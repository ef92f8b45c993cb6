package sandbox

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"gvx.dev/gvx/native/internal/image"
)

// This file runs real episodes. The test binary plays every part: the supervisor and the Sentry (it is what /proc/self/exe
// starts again), and, as the only program in a root file system made from it, the guest. As root the
// supervisor runs as uid 65534; nothing here needs a privilege.

func init() {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		runtime.LockOSThread() // As main does: the Sentry dies with the thread that starts it.
	}
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "run":
			os.Exit(Supervise(3))
		case "boot":
			os.Exit(Boot())
		case "guest":
			os.Exit(guest(os.Args[2], os.Args[3:]))
		}
	}
	code := m.Run()
	if world.dir != "" {
		_ = os.RemoveAll(world.dir)
	}
	os.Exit(code)
}

// guest is what runs inside.
func guest(what string, args []string) int {
	switch what {
	case "exit":
		n, _ := strconv.Atoi(args[0])
		return n
	case "die":
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		time.Sleep(time.Minute)
	case "cat":
		_, _ = io.Copy(os.Stdout, os.Stdin)
		fmt.Fprintln(os.Stderr, "end")
	case "trap": // says when it is ready, and exits with the number of the signal that it gets
		c := make(chan os.Signal, 1)
		signal.Notify(c, unix.SIGTERM, unix.SIGINT, unix.SIGUSR1, unix.SIGHUP)
		fmt.Println("ready")
		return int((<-c).(syscall.Signal))
	case "stubborn":
		signal.Ignore(unix.SIGTERM, unix.SIGINT)
		fmt.Println("ready")
		time.Sleep(time.Minute)
	case "sleep":
		fmt.Println("ready")
		time.Sleep(time.Minute)
	case "fork": // leaves a child behind
		_, err := os.StartProcess("/guest", []string{"/guest", "guest", "sleep"}, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
		if err != nil {
			fmt.Println(err)
			return 1
		}
		time.Sleep(100 * time.Millisecond)
	case "serve": // echoes capitals until the peer's half-close
		l, err := net.Listen("tcp", ":80")
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("ready")
		for {
			c, err := l.Accept()
			if err != nil {
				return 1
			}
			go func() {
				in, _ := io.ReadAll(c)
				_, _ = c.Write(bytes.ToUpper(in))
				_ = c.Close()
			}()
		}
	case "dial":
		for _, a := range args {
			c, err := net.DialTimeout("tcp", a, 3*time.Second)
			if err != nil {
				fmt.Printf("%s failed\n", a)
				continue
			}
			b, _ := io.ReadAll(c)
			fmt.Printf("%s says %s\n", a, b)
		}
	case "describe":
		host, _ := os.Hostname()
		wd, _ := os.Getwd()
		fmt.Println("host", host, "cwd", wd, "uid", os.Getuid(), "gid", os.Getgid(), "pid", os.Getpid(), "env", os.Environ())
		interfaces, _ := net.Interfaces()
		for _, i := range interfaces {
			addrs, _ := i.Addrs()
			fmt.Println("interface", i.Name, i.MTU, addrs)
		}
		for _, name := range []string{"/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/proc/mounts"} {
			b, err := os.ReadFile(name)
			fmt.Println("file", name, string(b), err)
		}
	case "write":
		if err := os.WriteFile(args[0], []byte("from the guest"), 0o644); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	return 0
}

// world is what all episodes share; it is made once.
var world struct {
	dir, binary, rootfs string
	err                 error
	made                bool
}

// setup makes the root file system and a copy of the test binary that an ordinary user can execute.
func setup(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs real sandboxes")
	}
	if !world.made {
		world.made = true
		world.err = makeWorld()
	}
	if world.err != nil {
		t.Fatal(world.err)
	}
}

func makeWorld() error {
	dir, err := os.MkdirTemp("", "gvx-smoke-")
	if err != nil {
		return err
	}
	world.dir = dir
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	world.binary = filepath.Join(dir, "gvx-sentry")
	if err := os.WriteFile(world.binary, self, 0o755); err != nil {
		return err
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, h := range []tar.Header{{Typeflag: tar.TypeDir, Name: "etc", Mode: 0o755}, {Typeflag: tar.TypeReg, Name: "guest", Mode: 0o755, Size: int64(len(self))}} {
		if err := w.WriteHeader(&h); err != nil {
			return err
		}
	}
	if _, err := w.Write(self); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return err
	}
	p, err := layout.Write(filepath.Join(dir, "layout"), empty.Index)
	if err != nil {
		return err
	}
	if err := p.AppendImage(img); err != nil {
		return err
	}
	cache, err := image.Open(filepath.Join(dir, "cache"))
	if err != nil {
		return err
	}
	infos, err := cache.Import(filepath.Join(dir, "layout"), "guest")
	if err != nil {
		return err
	}
	world.rootfs = filepath.Join(infos[0].Path, "root.erofs")
	return os.RemoveAll(filepath.Join(dir, "layout"))
}

// episode is a running supervisor.
type episode struct {
	t          *testing.T
	id         string
	cmd        *exec.Cmd
	lifeline   *os.File
	events     chan Event
	runtimeDir string
	stdout     *os.File
	stderr     bytes.Buffer
	started    time.Time
}

var episodes atomic.Int32

// start runs the guest with arguments; edit may change the document, files are passed from descriptor 10 on.
func start(t *testing.T, edit func(map[string]any), files []*os.File, args ...string) *episode {
	t.Helper()
	setup(t)
	e := &episode{t: t, id: fmt.Sprintf("smoke%d-%d", os.Getpid(), episodes.Add(1)), events: make(chan Event, 32)}
	e.runtimeDir = filepath.Join(world.dir, e.id)
	if err := os.Mkdir(e.runtimeDir, 0o700); err != nil {
		t.Fatal(err)
	}
	root, err := os.Open(world.rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	pipe := func() (*os.File, *os.File) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		return r, w
	}
	specR, specW := pipe()
	lifeR, lifeW := pipe()
	eventsR, eventsW := pipe()
	outR, outW := pipe()
	e.lifeline, e.stdout = lifeW, outR
	doc := map[string]any{
		"schema": Schema, "id": e.id, "rootfs": map[string]any{"fd": 4}, "lifeline_fd": 5, "events_fd": 6, "runtime_dir": e.runtimeDir,
		"process":   map[string]any{"args": append([]string{"/guest", "guest"}, args...), "env": []string{"PATH=/"}},
		"hostname":  "smoke",
		"resources": map[string]any{"memory_bytes": 512 << 20, "cpus": 2},
	}
	if edit != nil {
		edit(doc)
	}
	raw, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	e.cmd = exec.Command(world.binary, "run", "--spec-fd", "3")
	e.cmd.Stdout, e.cmd.Stderr = outW, &e.stderr
	e.cmd.Env = []string{"HOME=" + world.dir}
	e.cmd.ExtraFiles = append([]*os.File{specR, root, lifeR, eventsW, nil, nil, nil}, files...)
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Getuid() == 0 {
		e.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
		if err := os.Chown(e.runtimeDir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	e.started = time.Now()
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{specR, lifeR, eventsW, outW} {
		_ = f.Close()
	}
	if _, err := specW.Write(raw); err != nil {
		t.Fatal(err)
	}
	_ = specW.Close()
	go func() {
		defer close(e.events)
		for dec := json.NewDecoder(eventsR); ; {
			var ev Event
			if dec.Decode(&ev) != nil {
				_ = eventsR.Close()
				return
			}
			e.events <- ev
		}
	}()
	t.Cleanup(func() {
		_ = e.lifeline.Close()
		_ = e.cmd.Process.Kill()
		_ = e.cmd.Wait()
		e.gone()
	})
	return e
}

// ready waits for the guest's "ready".
func (e *episode) ready() {
	e.t.Helper()
	buf := make([]byte, 6)
	_ = e.stdout.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.ReadFull(e.stdout, buf); err != nil || string(buf) != "ready\n" {
		e.t.Fatalf("the guest said %q, %v; stderr %q", buf, err, e.stderr.String())
	}
}

// wait returns the exit code, what is left of stdout, and the last event; it checks that nothing of the episode remains.
func (e *episode) wait() (int, string, Event) {
	e.t.Helper()
	_ = e.stdout.SetReadDeadline(time.Now().Add(60 * time.Second))
	out, err := io.ReadAll(e.stdout)
	if err != nil {
		e.t.Fatalf("reading stdout: %v", err)
	}
	err = e.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		e.t.Fatal(err)
	}
	var last Event
	for ev := range e.events {
		last = ev
	}
	e.gone()
	return e.cmd.ProcessState.ExitCode(), string(out), last
}

// processes lists the processes of the episode that are alive: boot's command line, which stubs share, names the episode.
func (e *episode) processes() []string {
	var out []string
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		e.t.Fatal(err)
	}
	for _, d := range dirs {
		cmdline, err := os.ReadFile(d + "/cmdline")
		if err == nil && bytes.Contains(cmdline, []byte(e.id)) {
			out = append(out, filepath.Base(d)+" "+string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
	}
	return out
}

// gone fails the test when a process of the episode outlives it for a second (a quiet machine needs milliseconds).
func (e *episode) gone() {
	e.t.Helper()
	for deadline := time.Now().Add(time.Second); ; time.Sleep(2 * time.Millisecond) {
		left := e.processes()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			e.t.Errorf("left behind: %q", left)
			return
		}
	}
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		sig  int
	}{{[]string{"exit", "0"}, 0, 0}, {[]string{"exit", "7"}, 7, 0}, {[]string{"die"}, 137, 9}, {[]string{"fork"}, 0, 0}} {
		e := start(t, nil, nil, c.args...)
		code, out, last := e.wait()
		if code != c.code || last.Event != EventExit || last.Code == nil || *last.Code != c.code || (c.sig != 0) != (last.Signal != nil) {
			t.Errorf("%v: code %d, event %+v, stdout %q, stderr %q", c.args, code, last, out, e.stderr.String())
		}
		if names, _ := os.ReadDir(e.runtimeDir); len(names) != 1 || names[0].Name() != LogName {
			t.Errorf("%v: the runtime directory has %v, not just the log", c.args, names)
		}
	}
}

func TestInfrastructureErrors(t *testing.T) {
	for what, c := range map[string]struct {
		edit func(map[string]any)
		kind string
		text string
	}{
		"no program":   {func(d map[string]any) { d["process"] = map[string]any{"args": []string{"/missing"}} }, KindStart, "missing"},
		"bad document": {func(d map[string]any) { d["id"] = "" }, "", "id"},
		"bad fd":       {func(d map[string]any) { d["rootfs"] = map[string]any{"fd": 99} }, "", "descriptor 99 is not open"},
		"no erofs":     {func(d map[string]any) { d["rootfs"] = map[string]any{"fd": 10} }, KindSpec, "EROFS"},
		"no volume": {func(d map[string]any) {
			d["mounts"] = []any{map[string]any{"kind": "volume", "fd": 10, "destination": "/v"}}
		}, KindVolume, "/v"},
		"open to all":   {func(d map[string]any) { d["runtime_dir"] = "/tmp" }, KindSpec, "0700"},
		"socket in use": {func(d map[string]any) { publishUnix("/etc/passwd", 80)(d) }, KindSetup, "no socket"},
	} {
		null, err := os.OpenFile(filepath.Join(t.TempDir(), "empty"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		e := start(t, c.edit, []*os.File{null}, "exit", "0")
		code, _, last := e.wait()
		if d := time.Since(e.started); d > 1500*time.Millisecond {
			t.Errorf("%s: the error came after %v", what, d) // gVisor's own way takes two seconds.
		}
		stderr := e.stderr.String()
		if code != ExitInfrastructure || !strings.HasPrefix(stderr, "gvx-sentry: ") || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, c.text) {
			t.Errorf("%s: code %d, stderr %q", what, code, stderr)
		}
		if c.kind != "" && (last.Event != EventError || last.Kind != c.kind) {
			t.Errorf("%s: event %+v", what, last)
		}
		_ = null.Close()
	}
}

func TestStdioKeepsSharedOffsets(t *testing.T) {
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in := filepath.Join(dir, "in")
	if err := os.WriteFile(in, []byte("skipped|"+strings.Repeat("input ", 50_000)), 0o600); err != nil {
		t.Fatal(err)
	}
	stdin, err := os.Open(in)
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if _, err := stdin.Seek(8, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if _, err := out.WriteString("before\n"); err != nil {
		t.Fatal(err)
	}
	// A supervisor of its own, since stdout and stderr are one file here.
	setup(t)
	spec, runtimeDir := filepath.Join(dir, "spec"), filepath.Join(dir, "runtime")
	if err := os.Mkdir(runtimeDir, 0o700); err != nil {
		t.Fatal(err)
	}
	doc := map[string]any{"schema": Schema, "id": "stdio", "rootfs": map[string]any{"fd": 4}, "runtime_dir": runtimeDir,
		"process": map[string]any{"args": []string{"/guest", "guest", "cat"}}}
	raw, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(spec, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	specFile, err := os.Open(spec)
	if err != nil {
		t.Fatal(err)
	}
	defer specFile.Close()
	root, err := os.Open(world.rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	cmd := exec.Command(world.binary, "run", "--spec-fd", "3")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, out, out
	cmd.Env = []string{"HOME=" + world.dir}
	cmd.ExtraFiles = []*os.File{specFile, root}
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.WriteString("after\n"); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	text := string(got)
	if !strings.HasPrefix(text, "before\ninput ") || !strings.HasSuffix(text, "after\n") || !strings.Contains(text, "end\n") || strings.Count(text, "input ") != 50_000 {
		t.Errorf("the shared file has %d bytes: %.40q ... %q", len(text), text, text[max(0, len(text)-40):])
	}
}

func TestSignalsReachTheGuest(t *testing.T) {
	for _, sig := range []syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGUSR1, unix.SIGHUP} {
		e := start(t, nil, nil, "trap")
		e.ready()
		if err := e.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if code, _, last := e.wait(); code != int(sig) || last.Event != EventExit {
			t.Errorf("%v: code %d, event %+v, stderr %q", sig, code, last, e.stderr.String())
		}
	}
}

func TestStubbornGuestIsKilled(t *testing.T) {
	// After the grace period ...
	e := start(t, func(d map[string]any) { d["stop_grace_ms"] = 200 }, nil, "stubborn")
	e.ready()
	begun := time.Now()
	_ = e.cmd.Process.Signal(unix.SIGTERM)
	if code, _, last := e.wait(); code != 137 || last.Event != EventExit || last.Signal == nil || *last.Signal != 9 {
		t.Errorf("after the grace period: code %d, event %+v", code, last)
	}
	if d := time.Since(begun); d < 200*time.Millisecond {
		t.Errorf("killed after %v, within the grace period", d)
	}
	// ... or by the third signal.
	e = start(t, nil, nil, "stubborn")
	e.ready()
	for range 3 {
		_ = e.cmd.Process.Signal(unix.SIGINT)
		time.Sleep(100 * time.Millisecond)
	}
	if code, _, last := e.wait(); code != 137 || last.Event != EventExit {
		t.Errorf("after three SIGINT: code %d, event %+v", code, last)
	}
}

func publishUnix(path string, port int) func(map[string]any) {
	return func(d map[string]any) {
		d["network"] = map[string]any{"mode": "nat", "publish": []any{map[string]any{"host": map[string]any{"kind": "unix", "path": path}, "guest_port": port}}}
	}
}

// socketDir is a directory in which the supervisor's user can make sockets, with a short name.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gvx-s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if os.Getuid() == 0 {
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestPublishedSocket(t *testing.T) {
	path := filepath.Join(socketDir(t), "web.sock")
	// A socket that a killed run left is replaced.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	_ = stale.Close()
	if os.Getuid() == 0 {
		_ = os.Chown(path, 65534, 65534)
	}
	e := start(t, publishUnix(path, 80), nil, "serve")
	e.ready()
	msg := bytes.Repeat([]byte("published "), 100_000)
	for range 3 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = c.Write(msg)
			_ = c.(*net.UnixConn).CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, bytes.ToUpper(msg)) {
			t.Errorf("%d bytes came back, %v", len(got), err)
		}
		_ = c.Close()
	}
	_ = e.cmd.Process.Signal(unix.SIGTERM)
	if code, _, _ := e.wait(); code != 143 {
		t.Errorf("code %d", code)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestNetworkPolicy(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("host"))
			_ = c.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	gateway := fmt.Sprintf("10.0.2.2:%d", port)
	e := start(t, nil, nil, "dial", gateway, "169.254.169.254:80")
	if _, out, _ := e.wait(); out != gateway+" failed\n169.254.169.254:80 failed\n" {
		t.Errorf("by default: %q", out)
	}
	e = start(t, func(d map[string]any) {
		d["network"] = map[string]any{"mode": "nat", "allow": []string{fmt.Sprintf("127.0.0.1:%d", port)}}
	}, nil, "dial", gateway)
	if _, out, _ := e.wait(); out != gateway+" says host\n" {
		t.Errorf("where allowed: %q", out)
	}
}

func TestGuestsWorld(t *testing.T) {
	e := start(t, func(d map[string]any) {
		d["mounts"] = []any{map[string]any{"kind": "tmpfs", "destination": "/scratch", "size_bytes": 1 << 20}}
		d["process"].(map[string]any)["cwd"] = "/scratch/work"
		d["process"].(map[string]any)["user"] = map[string]any{"uid": 1000, "gid": 1001}
		d["process"].(map[string]any)["env"] = []string{"PATH=/", "K=V"}
	}, nil, "describe")
	_, out, _ := e.wait()
	for _, want := range []string{"host smoke cwd /scratch/work uid 1000 gid 1001 pid 1 env [PATH=/ K=V", "interface lo", "interface eth0 65520 [10.0.2.15/24",
		"10.0.2.15\tsmoke", "nameserver 10.0.2.3", "/scratch tmpfs rw,nosuid,nodev,noexec", "/dev/mqueue mqueue", "/dev/shm tmpfs", "/sys/fs/cgroup/memory cgroup"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	e = start(t, func(d map[string]any) { d["network"] = map[string]any{"mode": "none"} }, nil, "describe")
	if _, out, _ = e.wait(); !strings.Contains(out, "interface lo") || strings.Contains(out, "eth0") {
		t.Errorf("without a network:\n%s", out)
	}
}

// Whoever of the three is killed, the others end and nothing stays.
func TestKilledAtEveryLevel(t *testing.T) {
	for _, what := range []string{"lifeline", "supervisor", "sentry"} {
		dir := socketDir(t)
		path := filepath.Join(dir, "web.sock")
		e := start(t, publishUnix(path, 80), nil, "serve")
		e.ready()
		begun := time.Now()
		switch what {
		case "lifeline":
			_ = e.lifeline.Close()
		case "supervisor":
			_ = e.cmd.Process.Kill()
		case "sentry":
			for _, p := range e.processes() {
				pid, err := strconv.Atoi(strings.Fields(p)[0])
				if err != nil {
					t.Fatal(err)
				}
				// The Sentry is the child of the supervisor; the others are its stubs.
				if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && strings.Fields(string(stat[bytes.LastIndexByte(stat, ')'):]))[2] == strconv.Itoa(e.cmd.Process.Pid) {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
		}
		code, _, last := e.wait()
		t.Logf("%s killed: all gone after %v", what, time.Since(begun))
		switch what {
		case "lifeline":
			if code != ExitInfrastructure || last.Kind != KindLifeline {
				t.Errorf("lifeline: code %d, event %+v", code, last)
			}
		case "supervisor":
			continue // Its sockets are the launcher's to remove.
		case "sentry":
			if code != ExitInfrastructure || last.Kind != KindSentry || !strings.Contains(last.Message, "signal 9") {
				t.Errorf("sentry: code %d, event %+v", code, last)
			}
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: left behind: %v", what, left)
		}
	}
}

func TestDescriptorsDoNotLeak(t *testing.T) {
	stray, err := os.Create(filepath.Join(t.TempDir(), "stray-descriptor"))
	if err != nil {
		t.Fatal(err)
	}
	defer stray.Close()
	e := start(t, nil, []*os.File{stray}, "sleep")
	e.ready()
	looked := 0
	for _, p := range e.processes() {
		fds, err := filepath.Glob("/proc/" + strings.Fields(p)[0] + "/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			looked++
			if to, _ := os.Readlink(fd); strings.Contains(to, "stray-descriptor") {
				t.Errorf("%s holds a descriptor that the document does not name", p)
			}
		}
	}
	if looked == 0 {
		t.Error("no descriptors to look at")
	}
	_ = e.lifeline.Close()
	e.wait()
}

func TestVolumeIsLeftClean(t *testing.T) {
	for _, tool := range []string{"mke2fs", "e2fsck", "debugfs"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	for _, how := range []string{"exit", "signal"} {
		name := filepath.Join(t.TempDir(), "v.ext4")
		if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", name, "32M").CombinedOutput(); err != nil {
			t.Fatalf("mke2fs: %v\n%s", err, out)
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		mount := func(d map[string]any) {
			d["mounts"] = []any{map[string]any{"kind": "volume", "fd": 10, "destination": "/v"}}
		}
		e := start(t, mount, []*os.File{f}, "write", "/v/file")
		if code, out, _ := e.wait(); code != 0 {
			t.Fatalf("the guest could not write: %s %s", out, e.stderr.String())
		}
		if how == "signal" {
			e = start(t, mount, []*os.File{f}, "sleep")
			e.ready()
			_ = e.cmd.Process.Signal(unix.SIGTERM)
			if code, _, _ := e.wait(); code != 143 {
				t.Errorf("code %d", code)
			}
		}
		_ = f.Close()
		if out, err := exec.Command("e2fsck", "-fn", name).CombinedOutput(); err != nil {
			t.Errorf("%s: e2fsck: %v\n%s", how, err, out)
		}
		out, err := exec.Command("debugfs", "-R", "cat /file", name).Output()
		if err != nil || string(out) != "from the guest" {
			t.Errorf("%s: the file has %q, %v", how, out, err)
		}
	}
}

func TestSockets(t *testing.T) {
	// Listening twice is refused while the first one lives.
	path := filepath.Join(t.TempDir(), "s")
	l, err := listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second listener: %v", err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	_ = l.Close()
	if l, err = listenUnix(path); err != nil {
		t.Errorf("replacing a stale one: %v", err)
	} else {
		_ = l.Close()
	}
	if !slices.Contains(forwarded, os.Signal(unix.SIGTERM)) {
		t.Error("SIGTERM is not forwarded")
	}
}
