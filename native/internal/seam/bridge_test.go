package seam

import (
	"reflect"
	"testing"
	"unsafe"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/inet"
	"gvisor.dev/gvisor/pkg/sentry/socket/netstack"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// recorder is a subscriber that counts.
type recorder struct{ changed, deleted int }

func (r *recorder) OnInterfaceChangeEvent(context.Context, int32, inet.Interface) { r.changed++ }
func (r *recorder) OnInterfaceDeleteEvent(context.Context, int32, inet.Interface) { r.deleted++ }

// subscriber returns what a stack reports its events to.
func subscriber(t *testing.T, s *netstack.Stack) inet.InterfaceEventSubscriber {
	t.Helper()
	f := reflect.ValueOf(s).Elem().FieldByName("eventSubscriber")
	return *(*inet.InterfaceEventSubscriber)(unsafe.Pointer(f.UnsafeAddr()))
}

func TestBridgesKeepSwitchedFramesToThemselves(t *testing.T) {
	s := stack.New(stack.Options{NetworkProtocols: []stack.NetworkProtocolFactory{ipv4.NewProtocol}})
	defer s.Close()
	ns := netstack.NewStack(s, 1)
	next := &recorder{}
	ns.AddInterfaceEventSubscriber(next)
	if err := watchBridges(ns); err != nil {
		t.Fatal(err)
	}
	const bridgeID, portID, otherID = 1, 2, 3
	bridge := stack.NewBridgeEndpoint(1500)
	if err := s.CreateNICWithOptions(bridgeID, bridge, stack.NICOptions{Name: "br0", Kind: "bridge"}); err != nil {
		t.Fatal(err)
	}
	ports := map[tcpip.NICID]*channel.Endpoint{}
	for _, id := range []tcpip.NICID{portID, otherID} {
		ports[id] = channel.New(16, 1500, tcpip.LinkAddress([]byte{2, 0, 0, 0, 0, byte(id)}))
		if err := s.CreateNIC(id, ethernet.New(ports[id])); err != nil {
			t.Fatal(err)
		}
		if err := s.SetNICCoordinator(id, bridgeID); err != nil {
			t.Fatal(err)
		}
	}
	received := func() uint64 { return s.NICInfo()[bridgeID].Stats.Rx.Packets.Value() }
	container := tcpip.LinkAddress("\x02\x42\xac\x11\x00\x03")
	send := func(dst tcpip.LinkAddress) {
		frame := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize)
		header.Ethernet(frame).Encode(&header.EthernetFields{SrcAddr: "\x02\x42\xac\x11\x00\x02", DstAddr: dst, Type: header.IPv4ProtocolNumber})
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
		ports[portID].InjectInbound(header.IPv4ProtocolNumber, pkt)
		pkt.DecRef()
	}

	send(container)
	if received() == 0 {
		t.Log("gVisor's bridge has learned to keep switched frames to itself: this filter is not needed any more")
	}
	// The event of the bridge's creation; a second one must not stack a second filter.
	for range 2 {
		subscriber(t, ns).OnInterfaceChangeEvent(context.Background(), bridgeID, inet.Interface{Name: "br0", Kind: "bridge"})
	}
	if next.changed != 2 {
		t.Errorf("the real subscriber saw %d events of 2", next.changed)
	}
	before := received()
	send(container)
	if got := received() - before; got != 0 {
		t.Errorf("%d frames between two ports reached the bridge's own interface", got)
	}
	for _, dst := range []tcpip.LinkAddress{bridge.LinkAddress(), header.EthernetBroadcastAddress, "\x01\x00\x5e\x00\x00\x01"} {
		before := received()
		send(dst)
		if got := received() - before; got != 1 {
			t.Errorf("a frame to %s reached the bridge's own interface %d times", dst, got)
		}
	}
	subscriber(t, ns).OnInterfaceDeleteEvent(context.Background(), bridgeID, inet.Interface{Name: "br0"})
	if next.deleted != 1 {
		t.Error("the real subscriber saw no deletion")
	}
}
