package nodeapi

import (
	"context"
	"fmt"
	"net"
)

// agentPort is the port for agents. It accepts no connection before this replica can serve it: an agent would wait for
// its handshake, give it up and count it as a failed one, while a refused connection costs it nothing and sends it to
// another replica at once.
type agentPort struct {
	addr *net.TCPAddr
	lis  net.Listener // nil: not yet
}

// openPort reads the address. A port that the system chooses is opened at once, since it is not known before.
func openPort(ctx context.Context, address string) (*agentPort, error) {
	addr, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("read address for agents: %w", err)
	}
	p := &agentPort{addr: addr}
	if addr.Port != 0 {
		return p, nil
	}
	if err := p.listen(ctx); err != nil {
		return nil, err
	}
	if bound, ok := p.lis.Addr().(*net.TCPAddr); ok {
		p.addr = bound
	}
	return p, nil
}

// listen opens the port unless it is open.
func (p *agentPort) listen(ctx context.Context) error {
	if p.lis != nil {
		return nil
	}
	var err error
	if p.lis, err = (&net.ListenConfig{}).Listen(ctx, "tcp", p.addr.String()); err != nil {
		return fmt.Errorf("listen for agents: %w", err)
	}
	return nil
}

// close closes the port if it is open.
func (p *agentPort) close() {
	if p != nil && p.lis != nil {
		_ = p.lis.Close()
	}
}
