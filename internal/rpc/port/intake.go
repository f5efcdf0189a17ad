package port

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc/guard"
)

// The intake runs before connect. It identifies the caller before a byte of the body is read, so that a stranger costs
// little more than a refusal; and it reads the body of a method that takes one message, within bounds of its size, of
// its size after decompression, and of the time that it may take.

// intake returns the request as its handler may see it, or writes a refusal and returns nil.
func (s *Server) intake(w http.ResponseWriter, r *http.Request) *http.Request {
	policy, mounted := s.policies[r.URL.Path]
	if !mounted {
		// Health, reflection, and methods that do not exist: no decision of this package depends on their messages.
		r.Body = http.MaxBytesReader(w, r.Body, int64(s.cfg.MaxReadBytes)+envelopeBytes)
		return r
	}
	began := time.Now()
	ctx := s.guard.Correlate(r.Context(), r.Header)
	ctx, asserted, err := s.guard.Identify(ctx, policy, r.Header)
	if err != nil {
		if s.refuse(ctx, w, r, began, err) {
			return nil
		}
		return r // its content type is of no protocol; connect refuses it without reading the body
	}
	allowRest(ctx, restOfAdmitted)
	r = r.WithContext(guard.WithAdmitted(ctx, asserted))
	if policy.StreamsRequests() {
		return r
	}
	body, err := s.readBody(w, r, int64(s.cfg.MaxReadBytes)+envelopeBytes, s.cfg.BodyTimeout)
	if err == nil {
		body, err = s.inflate(r, body)
	}
	if err != nil {
		if s.refuse(ctx, w, r, began, err) {
			return nil
		}
		http.Error(w, fault.From(err).Public, http.StatusBadRequest)
		return nil
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return r
}

// refuse writes a typed refusal in the protocol of the request and reports whether the protocol has one.
func (s *Server) refuse(ctx context.Context, w http.ResponseWriter, r *http.Request, began time.Time, err error) bool {
	writer := connect.NewErrorWriter()
	if !writer.IsSupported(r) {
		return false
	}
	wire := s.guard.Finish(ctx, r.URL.Path, began, err)
	s.metrics.Unary(r.URL.Path, wire.Code().String(), time.Since(began))
	// Little of the rest of the body is read (see readingRest), and the connection of a stranger is closed.
	w.Header().Set("Connection", "close")
	if err := writer.Write(w, r, wire); err != nil {
		s.deps.Logger.LogAttrs(ctx, slog.LevelDebug, "refusal not written", slog.String("port", s.cfg.Name),
			slog.Any("error", err))
	}
	return true
}

// readBody reads the one message of a request, of at most limit bytes, within a time.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request, limit int64, within time.Duration) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "")
	}
	controller := http.NewResponseController(w)
	deadline := controller.SetReadDeadline(time.Now().Add(within)) // the recorder of a test supports none
	buffer := bytes.NewBuffer(make([]byte, 0, max(r.ContentLength, 0)+bytes.MinRead))
	_, err := buffer.ReadFrom(io.LimitReader(r.Body, limit+1))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED,
			fmt.Sprintf("the request's body did not arrive within %s", within))
	case err != nil:
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the request's body could not be read",
			fault.Cause(err))
	case int64(buffer.Len()) > limit:
		return nil, fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "")
	}
	if deadline == nil {
		if err := controller.SetReadDeadline(time.Time{}); err != nil {
			return nil, fmt.Errorf("clear read deadline: %w", err)
		}
	}
	return buffer.Bytes(), nil
}

const (
	// envelopeBytes bounds the bytes around a message.
	envelopeBytes = 16
	// envelopeHead is a flag and the length of the message, in gRPC, gRPC-Web and Connect's streams.
	envelopeHead   = 5
	flagCompressed = 1
)

// inflate returns the body uncompressed, and removes the headers and flags of its compression. Connect itself would
// decompress the whole of a message that is too large, to count its bytes.
func (s *Server) inflate(r *http.Request, body []byte) ([]byte, error) {
	contentType := r.Header.Get("Content-Type")
	header := "Content-Encoding"
	switch {
	case strings.HasPrefix(contentType, "application/grpc"):
		header = "Grpc-Encoding"
	case strings.HasPrefix(contentType, "application/connect+"):
		header = "Connect-Content-Encoding"
	}
	encoding := r.Header.Get(header)
	if encoding == "" || encoding == "identity" {
		return body, nil
	}
	if encoding != "gzip" {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet(header+": gzip or identity"))
	}
	if header == "Content-Encoding" {
		r.Header.Del(header)
		return s.gunzip(body)
	}
	if len(body) < envelopeHead || body[0]&flagCompressed == 0 {
		return body, nil
	}
	size := int64(binary.BigEndian.Uint32(body[1:envelopeHead]))
	if size > int64(len(body)-envelopeHead) {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "",
			fault.Unmet("the body ends before its message does"))
	}
	message, err := s.gunzip(body[envelopeHead : envelopeHead+size])
	if err != nil {
		return nil, err
	}
	out := make([]byte, envelopeHead, envelopeHead+len(message))
	out[0] = body[0] &^ flagCompressed
	binary.BigEndian.PutUint32(out[1:], uint32(len(message))) // at most MaxReadBytes
	return append(append(out, message...), body[envelopeHead+size:]...), nil
}

func (s *Server) gunzip(data []byte) ([]byte, error) {
	malformed := func(err error) error {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet("the body is not what gzip makes"),
			fault.Cause(err))
	}
	reader, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, malformed(err)
	}
	message, err := io.ReadAll(io.LimitReader(reader, int64(s.cfg.MaxReadBytes)+1))
	switch {
	case err != nil:
		return nil, malformed(err)
	case len(message) > s.cfg.MaxReadBytes:
		return nil, fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "")
	}
	return message, nil
}
