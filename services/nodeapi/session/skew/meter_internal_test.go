package skew

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestSkewOfHosts: each heartbeat is sent and arrives at moments of the database's clock, counted from Welcome.
func TestSkewOfHosts(t *testing.T) {
	type beat struct {
		sent, arrives time.Duration
		offset        time.Duration // of the host's clock when it is sent
		slept         time.Duration // for which the monotonic clock has stood still before
		want          time.Duration // to report
		report        bool
	}
	const day = 24 * time.Hour
	s, ms := time.Second, time.Millisecond
	for name, beats := range map[string][]beat{
		"right": {{sent: 15 * s, arrives: 15*s + 20*ms}, {sent: 30 * s, arrives: 30*s + 20*ms}},
		"a little off": {
			{sent: 15 * s, arrives: 15 * s, offset: 59 * s}, {sent: 30 * s, arrives: 30 * s, offset: -59 * s},
		},
		"a day ahead":                {{sent: 15 * s, arrives: 15 * s, offset: day, want: day, report: true}},
		"a day behind, before Ready": {{sent: 5 * ms, arrives: 10 * ms, offset: -day, want: -day + 5*ms, report: true}},
		"a slow network":             {{sent: 15 * s, arrives: 95 * s}},
		"a replica that stood still": {
			{sent: 15 * s, arrives: 15 * s}, {sent: 30 * s, arrives: 630 * s}, {sent: 45 * s, arrives: 630 * s},
		},
		"a host that was asleep": {{sent: 15 * s, arrives: 15 * s}, {sent: 15*s + day, arrives: 15*s + day, slept: day}},
		"it is right again": {
			{sent: 0, arrives: 0, offset: 2 * time.Minute, want: 2 * time.Minute, report: true},
			{sent: 15 * s, arrives: 15 * s, report: true},
			{sent: 75 * s, arrives: 75 * s},
		},
		"it stays off": {
			{sent: 0, arrives: 0, offset: day, want: day, report: true},
			{sent: 15 * s, arrives: 15 * s, offset: day},
			{sent: 300 * s, arrives: 300 * s, offset: day + 5*time.Minute},
			{sent: 600 * s, arrives: 600 * s, offset: 2 * day, want: 2 * day, report: true},
		},
		"it ends below half of the bound": {
			{sent: 0, arrives: 0, offset: 70 * s, want: 70 * s, report: true},
			{sent: 90 * s, arrives: 90 * s, offset: 50 * s},
			{sent: 180 * s, arrives: 180 * s, offset: 20 * s, report: true},
		},
	} {
		welcome := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		replica := time.Now()
		k := Meter{floor: welcome}
		asleep := time.Duration(0)
		for i, b := range beats {
			asleep += b.slept
			off, report := k.Heartbeat(&nodev1.Heartbeat{
				Monotonic: durationpb.New(time.Hour + b.sent - asleep), WallClock: timestamppb.New(welcome.Add(b.sent + b.offset)),
			}, welcome.Add(b.arrives), replica.Add(b.arrives))
			if report != b.report || (off-b.want).Abs() > 15*time.Second {
				t.Errorf("%s: heartbeat %d: %s, %t; want %s, %t", name, i+1, off, report, b.want, b.report)
			}
		}
	}
}

// TestTheToleranceOfClocks: a difference is reported from the configured one on, and over below half of it.
func TestTheToleranceOfClocks(t *testing.T) {
	welcome, replica := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), time.Now()
	k := Meter{floor: welcome, tolerance: 48 * time.Hour}
	for i, b := range []struct {
		offset time.Duration
		report bool
		want   time.Duration
	}{
		{24 * time.Hour, false, 0},
		{49 * time.Hour, true, 49 * time.Hour},
		{30 * time.Hour, true, 30 * time.Hour},
		{23 * time.Hour, true, 0},
	} {
		at := time.Duration(i) * time.Minute
		off, report := k.Heartbeat(&nodev1.Heartbeat{
			Monotonic: durationpb.New(at), WallClock: timestamppb.New(welcome.Add(at + b.offset)),
		}, welcome.Add(at), replica.Add(at))
		if report != b.report || report && (off-b.want).Abs() > time.Minute {
			t.Errorf("%s off: %s, %t; want %s, %t", b.offset, off, report, b.want, b.report)
		}
	}
}

// TestSkewOfHostileHeartbeats: clocks that no host has are bounded, and a flood of them is a few reports.
func TestSkewOfHostileHeartbeats(t *testing.T) {
	welcome, replica := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), time.Now()
	k := Meter{floor: welcome}
	reported := 0
	for i := range 1000 {
		at := time.Duration(i) * 10 * time.Millisecond
		f := &nodev1.Heartbeat{
			Monotonic: &durationpb.Duration{Seconds: int64(i%3-1) << 62},
			WallClock: &timestamppb.Timestamp{Seconds: []int64{-62135596800, 253402300799, 1 << 62, 0}[i%4]},
		}
		if _, report := k.Heartbeat(f, welcome.Add(at), replica.Add(at)); report {
			reported++
		}
	}
	if reported == 0 || reported > atOnce {
		t.Errorf("%d reports in ten seconds", reported)
	}
	none := Meter{floor: welcome}
	if _, report := none.Heartbeat(&nodev1.Heartbeat{}, welcome, replica); report {
		t.Error("a heartbeat without a clock was reported")
	}
	unknown := Meter{}
	if _, report := unknown.Heartbeat(&nodev1.Heartbeat{WallClock: timestamppb.New(welcome.Add(-time.Hour))}, welcome,
		replica); report {
		t.Error("a replica that does not know the database's clock reported")
	}
}
