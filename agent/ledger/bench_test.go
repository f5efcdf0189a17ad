package ledger_test

import (
	"context"
	"encoding/binary"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/internal/ids"
)

// rawCommits is the baseline: one writer, one small value a transaction, the same options, every commit synced.
func rawCommits(b *testing.B, path string, d time.Duration) float64 {
	b.Helper()
	db, err := bbolt.Open(path, 0o600,
		&bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType, InitialMmapSize: 16 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	name, value := []byte("x"), make([]byte, 200)
	begin := time.Now()
	var n uint64
	for time.Since(begin) < d {
		n++
		err := db.Update(func(tx *bbolt.Tx) error {
			bucket, err := tx.CreateBucketIfNotExists(name)
			if err != nil {
				return err
			}
			return bucket.Put(binary.BigEndian.AppendUint64(nil, n), value)
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	return float64(n) / time.Since(begin).Seconds()
}

// BenchmarkTaskCycles compares the rate of whole task lives (delivered and started, finished, acknowledged) of many
// goroutines with that of raw commits.
func BenchmarkTaskCycles(b *testing.B) {
	for _, workers := range []int{1, 16, 64} {
		b.Run(map[int]string{1: "alone", 16: "16", 64: "64"}[workers], func(b *testing.B) {
			raw := rawCommits(b, filepath.Join(b.TempDir(), "raw"), time.Second)
			l, err := ledger.Open(ledger.Config{Path: filepath.Join(b.TempDir(), "l")})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			b.ResetTimer()
			begin := time.Now()
			var left atomic.Int64
			left.Store(int64(b.N))
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					ws := ids.New()
					for left.Add(-1) >= 0 {
						d := task(deploy, ws, 1, 1)
						d.Start = true
						ctx := context.Background()
						if _, err := l.Deliver(ctx, d); err != nil {
							b.Error(err)
							return
						}
						if _, err := l.Finish(ctx, d.Key, succeeded, make([]byte, 100)); err != nil {
							b.Error(err)
							return
						}
						if err := l.Ack(ctx, d.Key); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			cycles := float64(b.N) / time.Since(begin).Seconds()
			s := l.Stats()
			b.ReportMetric(cycles, "cycles/s")
			b.ReportMetric(raw, "raw-commits/s")
			b.ReportMetric(cycles/raw, "ratio")
			b.ReportMetric(float64(s.Fsyncs)/float64(b.N), "fsyncs/cycle")
		})
	}
}
