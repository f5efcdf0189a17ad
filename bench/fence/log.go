package fence

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/gpuaas/mesh/internal/app"
)

// agentLog reads the lines that an agent logs, from its opening on.
type agentLog struct {
	file *os.File
	in   *bufio.Reader
	part []byte // of a line that is not complete yet
}

func openLog(path string) (*agentLog, error) {
	file, err := os.Open(path) // the log of an agent of ours
	if err != nil {
		return nil, fmt.Errorf("open the agent's log: %w", err)
	}
	if _, err := file.Seek(0, io.SeekEnd); err != nil {
		return nil, errors.Join(fmt.Errorf("find the end of the agent's log: %w", err), file.Close())
	}
	return &agentLog{file: file, in: bufio.NewReader(file)}, nil
}

func (l *agentLog) Close() { _ = l.file.Close() } // it was only read

// await returns when the agent logged the next such message since a moment. Others are skipped.
func (l *agentLog) await(ctx context.Context, since time.Time, message string) (time.Time, error) {
	for {
		part, err := l.in.ReadBytes('\n')
		l.part = append(l.part, part...)
		switch {
		case errors.Is(err, io.EOF):
			if !app.Sleep(ctx, 20*time.Millisecond) {
				return time.Time{}, fmt.Errorf("read the agent's log: %w", context.Cause(ctx))
			}
			continue
		case err != nil:
			return time.Time{}, fmt.Errorf("read the agent's log: %w", err)
		}
		var line struct {
			Time time.Time `json:"time"`
			Msg  string    `json:"msg"`
		}
		bad := json.Unmarshal(l.part, &line)
		l.part = l.part[:0]
		if bad == nil && line.Msg == message && !line.Time.Before(since) {
			return line.Time, nil
		}
	}
}
