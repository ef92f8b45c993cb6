package seam

import (
	goContext "context"
	"fmt"
	"reflect"
	"unsafe"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/inet"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/socket/netstack"
	"gvisor.dev/gvisor/pkg/state"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// FilterBridges makes bridges of the guest's root network namespace keep the frames that they switch between ports away
// from the namespace's own IP layer, as Linux does: gVisor's bridge hands it every frame, and where forwarding is on (docker
// turns it on), the frame of one container to another is switched *and* routed. The second copy makes the receiver reset TCP
// connections: with dockerd's networks in the guest, one of three failed.
//
// Call it after boot.New and before the guest runs. A bridge gets its filter when it is made, by the event of that.
func FilterBridges(k *kernel.Kernel) error {
	s, ok := k.RootNetworkNamespace().Stack().(*netstack.Stack)
	if !ok {
		return nil // No netstack, no bridges.
	}
	return watchBridges(s)
}

func watchBridges(s *netstack.Stack) error {
	if err := checkBridges(); err != nil {
		return err
	}
	f := reflect.ValueOf(s).Elem().FieldByName("eventSubscriber")
	field := (*inet.InterfaceEventSubscriber)(unsafe.Pointer(f.UnsafeAddr()))
	*field = &bridgeWatcher{stack: s, next: *field}
	return nil
}

// checkBridges verifies the private fields that this file uses.
func checkBridges() error {
	if err := checkField(reflect.TypeFor[netstack.Stack](), "eventSubscriber", reflect.TypeFor[inet.InterfaceEventSubscriber]()); err != nil {
		return err
	}
	bridge := reflect.TypeFor[stack.BridgeEndpoint]()
	if err := checkField(bridge, "dispatcher", reflect.TypeFor[stack.NetworkDispatcher]()); err != nil {
		return err
	}
	mu, ok := bridge.FieldByName("mu")
	if !ok {
		return fmt.Errorf("%w: %v has no field \"mu\"", ErrLayout, bridge)
	}
	if !reflect.PointerTo(mu.Type).Implements(reflect.TypeFor[locker]()) {
		return fmt.Errorf("%w: %v.mu is %v, no lock", ErrLayout, bridge, mu.Type)
	}
	return nil
}

type locker interface {
	Lock()
	Unlock()
}

// bridgeWatcher sees the events of a stack's interfaces before their real subscriber does.
type bridgeWatcher struct {
	stack *netstack.Stack
	next  inet.InterfaceEventSubscriber // nil for none
}

// OnInterfaceChangeEvent implements inet.InterfaceEventSubscriber.OnInterfaceChangeEvent.
func (w *bridgeWatcher) OnInterfaceChangeEvent(ctx context.Context, idx int32, i inet.Interface) {
	if bridge, ok := w.stack.Stack.GetLinkEndpointByName(i.Name).(*stack.BridgeEndpoint); ok {
		filterBridge(bridge)
	}
	if w.next != nil {
		w.next.OnInterfaceChangeEvent(ctx, idx, i)
	}
}

// OnInterfaceDeleteEvent implements inet.InterfaceEventSubscriber.OnInterfaceDeleteEvent.
func (w *bridgeWatcher) OnInterfaceDeleteEvent(ctx context.Context, idx int32, i inet.Interface) {
	if w.next != nil {
		w.next.OnInterfaceDeleteEvent(ctx, idx, i)
	}
}

// filterBridge puts a filter before the bridge's own interface, unless it has one.
func filterBridge(bridge *stack.BridgeEndpoint) {
	v := reflect.ValueOf(bridge).Elem()
	f := v.FieldByName("mu")
	mu := reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Interface().(locker)
	dispatcher := (*stack.NetworkDispatcher)(unsafe.Pointer(v.FieldByName("dispatcher").UnsafeAddr()))
	mu.Lock()
	defer mu.Unlock()
	if *dispatcher == nil {
		return // Not attached to an interface, or not any more.
	}
	if _, done := (*dispatcher).(*bridgeFilter); !done {
		*dispatcher = &bridgeFilter{bridge: bridge, next: *dispatcher}
	}
}

// bridgeFilter passes the frames on that the bridge's interface itself is to receive.
type bridgeFilter struct {
	bridge *stack.BridgeEndpoint
	next   stack.NetworkDispatcher
}

// DeliverNetworkPacket implements stack.NetworkDispatcher.DeliverNetworkPacket.
func (f *bridgeFilter) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	frame := pkt.LinkHeader().Slice()
	if len(frame) >= header.EthernetMinimumSize {
		dst := header.Ethernet(frame).DestinationAddress()
		if dst != f.bridge.LinkAddress() && dst != header.EthernetBroadcastAddress && !header.IsMulticastEthernetAddress(dst) {
			return
		}
	}
	f.next.DeliverNetworkPacket(protocol, pkt)
}

// DeliverLinkPacket implements stack.NetworkDispatcher.DeliverLinkPacket.
func (f *bridgeFilter) DeliverLinkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	f.next.DeliverLinkPacket(protocol, pkt)
}

// Stacks and bridges are part of a checkpoint, and so is what they point to.

// StateTypeName implements state.Type.StateTypeName.
func (*bridgeWatcher) StateTypeName() string { return "gvx.dev/gvx/native/internal/seam.bridgeWatcher" }

// StateFields implements state.Type.StateFields.
func (*bridgeWatcher) StateFields() []string { return []string{"stack", "next"} }

// StateSave implements state.SaverLoader.StateSave.
func (w *bridgeWatcher) StateSave(sink state.Sink) {
	sink.Save(0, &w.stack)
	sink.Save(1, &w.next)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (w *bridgeWatcher) StateLoad(_ goContext.Context, source state.Source) {
	source.Load(0, &w.stack)
	source.Load(1, &w.next)
}

// StateTypeName implements state.Type.StateTypeName.
func (*bridgeFilter) StateTypeName() string { return "gvx.dev/gvx/native/internal/seam.bridgeFilter" }

// StateFields implements state.Type.StateFields.
func (*bridgeFilter) StateFields() []string { return []string{"bridge", "next"} }

// StateSave implements state.SaverLoader.StateSave.
func (f *bridgeFilter) StateSave(sink state.Sink) {
	sink.Save(0, &f.bridge)
	sink.Save(1, &f.next)
}

// StateLoad implements state.SaverLoader.StateLoad.
func (f *bridgeFilter) StateLoad(_ goContext.Context, source state.Source) {
	source.Load(0, &f.bridge)
	source.Load(1, &f.next)
}

func init() {
	state.Register((*bridgeWatcher)(nil))
	state.Register((*bridgeFilter)(nil))
}
