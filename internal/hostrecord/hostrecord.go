// Package hostrecord reads the diagnostic record of a host in the forms in which a person brings it: the agent's file
// diagnostics.json, and what `gpuaas-node-agent diag` prints.
//
// It believes nothing in the record: what cannot be read of an entry is left out, the number of entries and the length
// of texts are bounded, and fields that it does not know are ignored, so that records of earlier and later agents are
// read. It decides nothing about what an entry means.
package hostrecord

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// The bounds of what is read.
const (
	MaxBytes   = 1 << 20
	MaxEntries = 256 // the newest
	maxCode    = 64
	maxDetail  = 1024
	maxID      = 64
)

// Read reads a record of at most MaxBytes from r, oldest entry first.
func Read(r io.Reader) ([]*recoveryv1.HostRecord, error) {
	data, err := io.ReadAll(io.LimitReader(r, MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read diagnostic record: %w", err)
	}
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("read diagnostic record: it is larger than %d bytes", MaxBytes)
	}
	return Parse(data)
}

// Parse returns the newest entries of a record. A record without a readable entry is an error.
func Parse(data []byte) ([]*recoveryv1.HostRecord, error) {
	var list []json.RawMessage
	if err := json.Unmarshal(data, &list); err != nil {
		printed := struct{ Items *[]json.RawMessage }{}
		if other := json.Unmarshal(data, &printed); other != nil || printed.Items == nil {
			return nil, errors.New("this is no diagnostic record: neither diagnostics.json of an agent nor what " +
				"`gpuaas-node-agent diag` prints")
		}
		list = *printed.Items
	}
	list = list[max(len(list)-MaxEntries, 0):]
	out := make([]*recoveryv1.HostRecord, 0, len(list))
	for _, raw := range list {
		if r := record(raw); r != nil {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		return nil, errors.New("the diagnostic record has no entry that can be read")
	}
	return out, nil
}

// record returns one entry; nil if it has no code. Values are read one by one: a bad one leaves out itself alone.
func record(raw json.RawMessage) *recoveryv1.HostRecord {
	fields := map[string]any{}
	if json.Unmarshal(raw, &fields) != nil {
		return nil
	}
	code := text(fields["code"], maxCode)
	if code == "" {
		return nil
	}
	r := &recoveryv1.HostRecord{
		Code: code, Detail: text(fields["detail"], maxDetail), FirstSeenAt: at(fields["first_seen"]),
		LastSeenAt: at(fields["last_seen"]), Count: int64(number(fields["count"], math.MaxInt32)),
		EndedAt:            at(fields["ended_at"]),
		RetryCorrelationId: text(fields["retry_correlation_id"], maxID),
		DedupeKeyHash:      text(fields["dedupe_key_hash"], maxID),
	}
	const day = 24 * 60 * 60
	seconds := number(fields["next_retry_seconds"], day)
	if _, stored := fields["next_retry_nanoseconds"]; stored {
		seconds = number(fields["next_retry_nanoseconds"], day*1e9) / 1e9
	}
	if seconds > 0 {
		r.NextRetry = durationpb.New(time.Duration(seconds * float64(time.Second)))
	}
	return r
}

func text(value any, most int) string {
	s, _ := value.(string)
	return strings.ToValidUTF8(s[:min(len(s), most)], "")
}

func number(value any, most float64) float64 {
	n, _ := value.(float64)
	if math.IsNaN(n) {
		return 0
	}
	return min(max(n, 0), most)
}

// at returns a time, and nil for one that is zero or cannot be read.
func at(value any) *timestamppb.Timestamp {
	s, _ := value.(string)
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.IsZero() {
		return nil
	}
	out := timestamppb.New(t)
	if out.CheckValid() != nil {
		return nil
	}
	return out
}
