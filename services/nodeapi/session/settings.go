package session

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/gpuaas/mesh/internal/config"
)

// Limits of the agents' port. Zero fields take the defaults.
type Limits struct {
	MaxConnections int    // open connections; default 16384
	StreamsPerConn uint32 // at once; default 8
	// StreamsPerSecond bounds the streams that one connection opens; more end it, and streams that are reset at once count
	// too; default 32.
	StreamsPerSecond  int
	MessageBytes      int           // default 1 MiB
	HeaderBytes       uint32        // default 16 KiB
	Handshake         time.Duration // default 9 s, the wait for a turn included
	FirstFrame        time.Duration // default 5 s
	OpenBurst         int           // streams that one certificate may open at once; default 3
	OpenEvery         time.Duration // then one stream per OpenEvery; default 10 s
	FramesPerSecond   int           // of one session; default 2000
	HeartbeatsPerSec  int           // of one session; more are coalesced; default 5
	Challenge         time.Duration // to answer a challenge; default 5 s
	KeepaliveInterval time.Duration // default 15 s
	ClockTolerance    time.Duration // from which the clock of a host is reported; default skew.Tolerance
	KeepaliveTimeout  time.Duration // default 10 s
}

var defaultLimits = Limits{
	MaxConnections: 16384, StreamsPerConn: 8, StreamsPerSecond: 32, MessageBytes: 1 << 20, HeaderBytes: 16 << 10,
	OpenBurst: 3, FramesPerSecond: 2000, HeartbeatsPerSec: 5, Handshake: 9 * time.Second, FirstFrame: 5 * time.Second,
	OpenEvery: 10 * time.Second, Challenge: 5 * time.Second, KeepaliveInterval: 15 * time.Second,
	KeepaliveTimeout: 10 * time.Second,
}

// Transport returns the options of the port's connections: sizes, windows and times, which decide how much memory a
// connection needs.
func (l Limits) Transport() []grpc.ServerOption {
	lim := config.Or(l, defaultLimits)
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(lim.StreamsPerConn),
		grpc.MaxRecvMsgSize(lim.MessageBytes),
		grpc.MaxSendMsgSize(4 << 20),
		grpc.MaxHeaderListSize(lim.HeaderBytes),
		grpc.ConnectionTimeout(lim.Handshake),
		grpc.ReadBufferSize(0),
		grpc.WriteBufferSize(4 << 10),
		// An agent sends its headers once, so a header table would never be used.
		grpc.HeaderTableSize(0),
		// The windows are fixed: the bytes that an agent may send ahead are bounded, and grpc does not probe the bandwidth to
		// it.
		grpc.InitialWindowSize(64 << 10), grpc.InitialConnWindowSize(64 << 10),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			// A connection without a stream is closed soon.
			MaxConnectionIdle: lim.FirstFrame,
			Time:              lim.KeepaliveInterval, Timeout: lim.KeepaliveTimeout,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: false}),
	}
}
