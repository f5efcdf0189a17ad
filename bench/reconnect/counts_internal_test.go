package reconnect

import (
	"maps"
	"strings"
	"testing"
)

func TestCountersOfAReplica(t *testing.T) {
	const text = `# HELP gpuaas_agent_connections_shed_total Connections closed before TLS.
# TYPE gpuaas_agent_connections_shed_total counter
gpuaas_agent_connections_shed_total 12
gpuaas_agent_handshakes_refused_total{reason="timeout"} 3
gpuaas_agent_handshakes_refused_total{reason="closed"} 0
gpuaas_agent_streams 1000
`
	got := map[string]int{"connections_shed": 1}
	if err := readCounts(strings.NewReader(text), got); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"connections_shed": 13, `handshakes_refused{reason="timeout"}`: 3}
	if !maps.Equal(got, want) {
		t.Errorf("counters = %v, want %v", got, want)
	}
}

func TestKindsOfFailedTries(t *testing.T) {
	for text, want := range map[string]string{
		"no TLS handshake from 127.0.0.1:4711 within 4s": "no TLS handshake",
		"TLS handshake: EOF":                             "TLS handshake: EOF",
		"TLS handshake: read tcp 127.0.0.1:1->127.0.0.1:2: read: connection reset by peer": "TLS handshake: " +
			"connection reset by peer",
		"dial tcp 127.0.0.1:4711: connect: connection refused": "connection refused",
		"context deadline exceeded\nclose tcp 127.0.0.1:1: x":  "context deadline exceeded",
	} {
		if got := kindOf(text); got != want {
			t.Errorf("kindOf(%q) = %q, want %q", text, got, want)
		}
	}
}
