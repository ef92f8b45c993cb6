// Package control is the typed client of a Sentry's control server: gVisor's uRPC over a unix socket, with the handful
// of calls that an episode needs.
//
// The server's socket lies in the episode's private runtime directory. The supervisor makes it, connects both clients that a run
// needs before the Sentry exists (its own, and the one by which the boot process starts its guest), and hands the listening socket
// down: no process has to look a path up later, and the Sentry, which may open nothing, does not have to.
package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/unet"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
)

// SocketName is the control socket's name in the runtime directory.
const SocketName = "control.sock"

// backlog of the control socket: both clients are connected before anyone accepts.
const backlog = 8

// Client talks to one Sentry. Calls are made one after another.
type Client struct {
	rpc *urpc.Client
}

// Socket is a bound, listening control socket. Addr is an address that works whatever the length of the directory's path.
type Socket struct {
	FD   int
	dir  *os.File
	addr string
}

// Listen makes the control socket in dir, which should be private (0700) since whoever connects owns the guest.
func Listen(dir string) (*Socket, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	// A path through the descriptor is short, while sun_path holds 107 bytes.
	addr := "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + SocketName
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	s := &Socket{FD: fd, dir: d, addr: addr}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: addr}); err != nil {
		s.Close()
		return nil, fmt.Errorf("control socket %s: %w", filepath.Join(dir, SocketName), err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		s.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return s, nil
}

// Connect returns a connected descriptor. It does not need the server to accept, only the backlog to have room.
func (s *Socket) Connect() (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("control connection: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: s.addr}); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("control connection: %w", err)
	}
	return fd, nil
}

// Close closes this process's copies of the descriptors; a server that inherited the socket goes on.
func (s *Socket) Close() {
	if s.FD >= 0 {
		_ = unix.Close(s.FD)
		s.FD = -1
	}
	_ = s.dir.Close()
}

// NewClient makes a client of a connected descriptor, which it takes over.
func NewClient(fd int) (*Client, error) {
	sock, err := unet.NewSocket(fd)
	if err != nil {
		return nil, fmt.Errorf("control connection: %w", err)
	}
	return &Client{rpc: urpc.NewClient(sock)}, nil
}

// Close ends the connection. The Sentry's teardown waits for clients that are still open.
func (c *Client) Close() error { return c.rpc.Close() }

// SetNetwork hands the guest's network devices over; it must precede Start.
func (c *Client) SetNetwork(args *boot.CreateLinksAndRoutesArgs) error {
	if err := c.rpc.Call(boot.ContMgrSetNetworkArgs, args, nil); err != nil {
		return fmt.Errorf("configuring the network: %w", err)
	}
	return nil
}

// Start starts the guest's init process and returns when it runs.
func (c *Client) Start(id string) error {
	if err := c.rpc.Call(boot.ContMgrRootContainerStart, &id, nil); err != nil {
		return fmt.Errorf("starting the guest: %w", err)
	}
	return nil
}

// Signal sends a signal to the guest's init process.
func (c *Client) Signal(id string, sig unix.Signal) error {
	args := boot.SignalArgs{CID: id, Signo: int32(sig), Mode: boot.DeliverToProcess}
	if err := c.rpc.Call(boot.ContMgrSignal, &args, nil); err != nil {
		return fmt.Errorf("signal %d to the guest: %w", sig, err)
	}
	return nil
}

// Remove unlinks the control socket of a runtime directory; one that is not there is no error.
func Remove(dir string) error {
	if err := os.Remove(filepath.Join(dir, SocketName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
