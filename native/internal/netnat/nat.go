// Package netnat is the user-space network of an episode: a small TCP/IP stack of its own at the other end of the guest's
// cable, which turns the guest's connections into ordinary sockets of this process. It needs no privilege, no TAP device and no
// network namespace.
//
// The guest sees 10.0.2.0/24 as QEMU's user network and slirp4netns lay it out: itself at 10.0.2.15, a gateway at 10.0.2.2 (which
// stands for the host's loopback, where the policy lets it), a DNS server at 10.0.2.3. The cable is an AF_UNIX SOCK_SEQPACKET socketpair that
// carries Ethernet frames.
package netnat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// The guest's network.
var (
	// Gateway is the default route; connections to it go to the host's loopback where the policy allows that.
	Gateway = netip.MustParseAddr("10.0.2.2")
	// DNS answers on port 53, UDP and TCP.
	DNS = netip.MustParseAddr("10.0.2.3")
	// Guest is the address of the guest's eth0.
	Guest = netip.MustParseAddr("10.0.2.15")
	// GatewayMAC and GuestMAC are the two ends of the cable (locally administered).
	GatewayMAC = net.HardwareAddr{0x5a, 0x94, 0xef, 0xe4, 0x0c, 0xdd}
	GuestMAC   = net.HardwareAddr{0x5a, 0x94, 0xef, 0xe4, 0x0c, 0xee}
)

const (
	// MTU of the cable. Throughput is nearly proportional to it; 65520 is the most that leaves room for headers in 64 KiB.
	MTU = 65520
	// PrefixLen of the guest's network.
	PrefixLen = 24

	nicID = 1
	// cableBuffer is the socket buffer at each end. A frame that does not fit is dropped, so it holds many of the largest.
	cableBuffer = 4 << 20
	// dialTimeout bounds a connection attempt to the outside, and one to the guest.
	dialTimeout = 10 * time.Second
	// maxTCPInFlight bounds the connection attempts that wait for the outside at one time.
	maxTCPInFlight = 1024
	// maxTCPFlows bounds the TCP connections held for the guest, each with two buffers here; beyond it, new ones are refused.
	maxTCPFlows = 2048
	// maxUDPFlows bounds the UDP sockets held for the guest; beyond it, new flows are dropped.
	maxUDPFlows = 1024
	// udpIdle ends a UDP flow without traffic (RFC 4787 wants at least two minutes, except for DNS).
	udpIdle    = 2 * time.Minute
	copyBuffer = 256 << 10
)

// Cable makes the socketpair between the guest's stack and ours, with both ends' buffers set. The caller closes both.
func Cable() (ours, guests int, err error) {
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("socketpair for the network: %w", err)
	}
	for _, fd := range sp {
		for _, opt := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF} {
			// The kernel silently caps it at net.core.{w,r}mem_max: slower, yet working.
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, cableBuffer); err != nil {
				_ = unix.Close(sp[0])
				_ = unix.Close(sp[1])
				return -1, -1, fmt.Errorf("socket buffer of the network: %w", err)
			}
		}
	}
	return sp[0], sp[1], nil
}

// NAT is a running user-space network.
type NAT struct {
	stack    *stack.Stack
	policy   *Policy
	resolver *resolver
	dialer   net.Dialer
	tcpFlows chan struct{} // one slot a flow
	udpFlows chan struct{}
}

// New starts the network on fd, our end of the cable, which it takes over. A nil policy is the default one.
func New(fd int, policy *Policy) (*NAT, error) {
	if policy == nil {
		policy = &Policy{}
	}
	ep, err := fdbased.New(&fdbased.Options{
		FDs: []int{fd}, MTU: MTU, EthernetHeader: true, Address: tcpip.LinkAddress(GatewayMAC),
		PacketDispatchMode: fdbased.RecvMMsg,
		// Nothing on a socketpair can damage a frame between two stacks of this machine.
		RXChecksumOffload: true,
	})
	if err != nil {
		return nil, fmt.Errorf("network endpoint: %w", err)
	}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	n := &NAT{
		stack: s, policy: policy, resolver: newResolver(), dialer: net.Dialer{Timeout: dialTimeout},
		tcpFlows: make(chan struct{}, maxTCPFlows), udpFlows: make(chan struct{}, maxUDPFlows),
	}
	// The handlers come before the NIC: the guest may send as soon as it exists.
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxTCPInFlight, n.handleTCP).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, n.handleUDP).HandlePacket)
	sack := tcpip.TCPSACKEnabled(true)
	if e := s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); e != nil {
		return nil, fmt.Errorf("network: SACK: %v", e)
	}
	if e := s.CreateNIC(nicID, ep); e != nil {
		return nil, fmt.Errorf("network: NIC: %v", e)
	}
	for _, ip := range []netip.Addr{Gateway, DNS} {
		addr := tcpip.ProtocolAddress{
			Protocol:          ipv4.ProtocolNumber,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(ip.As4()), PrefixLen: PrefixLen},
		}
		if e := s.AddProtocolAddress(nicID, addr, stack.AddressProperties{}); e != nil {
			return nil, fmt.Errorf("network: address %s: %v", ip, e)
		}
	}
	// Promiscuous: take frames for any address. Spoofing: answer from any address. Both make this end "the Internet".
	if e := s.SetPromiscuousMode(nicID, true); e != nil {
		return nil, fmt.Errorf("network: promiscuous mode: %v", e)
	}
	if e := s.SetSpoofing(nicID, true); e != nil {
		return nil, fmt.Errorf("network: spoofing: %v", e)
	}
	guest := tcpip.AddrFrom4(Guest.As4())
	if e := s.AddStaticNeighbor(nicID, ipv4.ProtocolNumber, guest, tcpip.LinkAddress(GuestMAC)); e != nil {
		return nil, fmt.Errorf("network: neighbour: %v", e)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: tcpip.AddressWithPrefix{PrefixLen: 0, Address: tcpip.AddrFrom4([4]byte{})}.Subnet(), NIC: nicID}})
	return n, nil
}

// Close ends every connection and the stack; it does not wait for them.
func (n *NAT) Close() { n.stack.Close() }

// DialGuest connects to a TCP port of the guest. A port nobody listens on fails with "connection was refused".
func (n *NAT) DialGuest(ctx context.Context, port uint16) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	addr := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(Guest.As4()), Port: port}
	return gonet.DialContextTCP(ctx, n.stack, addr, ipv4.ProtocolNumber)
}

// Publish serves connections of a listener with a TCP port of the guest until the listener is closed. While nobody listens in the guest,
// a connection is accepted and closed at once: there is no way to refuse one of a backlog.
func (n *NAT) Publish(l net.Listener, guestPort uint16) error {
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var temporary interface{ Temporary() bool }
			if errors.As(err, &temporary) && temporary.Temporary() {
				time.Sleep(10 * time.Millisecond) // Out of descriptors, or a client that left: go on.
				continue
			}
			return fmt.Errorf("accepting for guest port %d: %w", guestPort, err)
		}
		go func() {
			guest, err := n.DialGuest(context.Background(), guestPort)
			if err != nil {
				_ = c.Close()
				return
			}
			join(c, guest)
		}()
	}
}

// hostAddr translates a destination that the guest sees to one of the host's side.
func hostAddr(dst netip.AddrPort) netip.AddrPort {
	if dst.Addr() == Gateway {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dst.Port())
	}
	return dst
}

// dial opens a host socket for a destination of the guest's, when the policy has nothing against it.
func (n *NAT) dial(network string, dst netip.AddrPort) (net.Conn, error) {
	host := hostAddr(dst)
	if !n.policy.Allowed(host) {
		return nil, fmt.Errorf("%s %s: %w", network, dst, errDenied)
	}
	return n.dialer.Dial(network, host.String())
}

func destination(id stack.TransportEndpointID) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort)
}

// handleTCP runs in a goroutine of the forwarder's for each SYN of the guest.
func (n *NAT) handleTCP(r *tcp.ForwarderRequest) {
	select {
	case n.tcpFlows <- struct{}{}:
		defer func() { <-n.tcpFlows }()
	default:
		r.Complete(true)
		return
	}
	dst := destination(r.ID())
	var serve func(net.Conn)
	if dst == netip.AddrPortFrom(DNS, dnsPort) {
		serve = n.resolver.serveTCP
	} else {
		out, err := n.dial("tcp4", dst)
		if err != nil {
			r.Complete(true) // A reset: the guest sees "connection refused" at once, not a timeout.
			return
		}
		serve = func(in net.Conn) { join(in, out) }
	}
	var wq waiter.Queue
	ep, terr := r.CreateEndpoint(&wq)
	r.Complete(terr != nil)
	if terr != nil {
		serve(closedConn{})
		return
	}
	serve(gonet.NewTCPConn(&wq, ep))
}

// handleUDP runs for the first datagram of a flow; further ones go to the endpoint made here.
func (n *NAT) handleUDP(r *udp.ForwarderRequest) bool {
	dst := destination(r.ID())
	isDNS := dst == netip.AddrPortFrom(DNS, dnsPort)
	if !isDNS && !n.policy.Allowed(hostAddr(dst)) {
		return false // Unhandled: the stack answers "port unreachable".
	}
	select {
	case n.udpFlows <- struct{}{}:
	default:
		return true // Dropped, as a full table of a router does.
	}
	release := func() { <-n.udpFlows }
	var wq waiter.Queue
	ep, terr := r.CreateEndpoint(&wq)
	if terr != nil {
		release()
		return true
	}
	in := gonet.NewUDPConn(&wq, ep)
	go func() {
		defer release()
		defer in.Close()
		if isDNS {
			n.resolver.serveUDP(in)
			return
		}
		out, err := n.dial("udp4", dst)
		if err != nil {
			return
		}
		joinUDP(in, out)
	}()
	return true
}

// closedConn stands for a guest's connection that came to nothing, so that its counterpart is closed by the usual path.
type closedConn struct{ net.Conn }

func (closedConn) Read([]byte) (int, error)         { return 0, net.ErrClosed }
func (closedConn) Write([]byte) (int, error)        { return 0, net.ErrClosed }
func (closedConn) Close() error                     { return nil }
func (closedConn) SetReadDeadline(time.Time) error  { return nil }
func (closedConn) SetWriteDeadline(time.Time) error { return nil }

var buffers = sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}

// join copies both ways until both directions have ended, then closes both. An orderly end of one direction is passed
// on as a half-close (attach and exec of docker depend on that); an error ends both at once.
func join(a, b net.Conn) {
	var wg sync.WaitGroup
	oneWay := func(dst, src net.Conn) {
		defer wg.Done()
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		// The wrappers hide ReadFrom and WriteTo, whose own buffers would be smaller.
		_, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, *buf)
		if err == nil {
			if half, ok := dst.(interface{ CloseWrite() error }); ok {
				err = half.CloseWrite()
			}
		}
		if err != nil {
			_ = a.Close()
			_ = b.Close()
		}
	}
	wg.Add(2)
	go oneWay(a, b)
	go oneWay(b, a)
	wg.Wait()
	_ = a.Close()
	_ = b.Close()
}

// joinUDP copies datagrams both ways until neither side has sent any for udpIdle.
func joinUDP(a, b net.Conn) {
	var mu sync.Mutex
	last := time.Now()
	touch := func() {
		mu.Lock()
		last = time.Now()
		mu.Unlock()
	}
	idleSince := func() time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return time.Since(last)
	}
	oneWay := func(dst, src net.Conn) {
		defer a.Close()
		defer b.Close()
		buf := make([]byte, 65536)
		for {
			if err := src.SetReadDeadline(time.Now().Add(udpIdle)); err != nil {
				return
			}
			k, err := src.Read(buf)
			if err != nil {
				var timeout net.Error
				if errors.As(err, &timeout) && timeout.Timeout() && idleSince() < udpIdle {
					continue // The other direction was active meanwhile.
				}
				return
			}
			touch()
			if _, err := dst.Write(buf[:k]); err != nil {
				return
			}
		}
	}
	go oneWay(a, b)
	oneWay(b, a)
}
