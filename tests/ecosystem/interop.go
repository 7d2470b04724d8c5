// SPDX-License-Identifier: Apache-2.0

// gRPC's interop cases that apply, with gRPC for Go: interop ADDRESS FOLDER. The messages are files
// in the folder. Prints "ok CASE" or "failed CASE: WHY" for each case.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/ioutil"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	service  = "/attend.v1.AttentionService/"
	patience = 30 * time.Second
)

// Passes messages through as bytes.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string { return "proto" }

type client struct {
	connection *grpc.ClientConn
	folder     string
}

func (c *client) file(name string) []byte {
	data, err := ioutil.ReadFile(filepath.Join(c.folder, name))
	if err != nil {
		panic(err)
	}
	return data
}

func (c *client) call(ctx context.Context, path string, request []byte,
	options ...grpc.CallOption) ([]byte, error) {
	var answer []byte
	err := c.connection.Invoke(ctx, path, &request, &answer, options...)
	return answer, err
}

func (c *client) stream(ctx context.Context) (grpc.ClientStream, error) {
	description := grpc.StreamDesc{StreamName: "AttendStream", ServerStreams: true, ClientStreams: true}
	return c.connection.NewStream(ctx, &description, service+"AttendStream")
}

func (c *client) ask(stream grpc.ClientStream) ([]byte, error) {
	request := c.file("small")
	if err := stream.SendMsg(&request); err != nil {
		return nil, err
	}
	var answer []byte
	err := stream.RecvMsg(&answer)
	return answer, err
}

// Returns an error unless the call failed with this code and a message that contains the text.
func wants(err error, code codes.Code, text string) error {
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), text) {
		return fmt.Errorf("%v is not %v with %q", err, code, text)
	}
	return nil
}

func enough(answer []byte, err error, bytes int) error {
	if err == nil && len(answer) < bytes {
		err = fmt.Errorf("%d bytes came, %d were wanted", len(answer), bytes)
	}
	return err
}

func (c *client) emptyUnary(ctx context.Context) error {
	answer, err := c.call(ctx, service+"GetServerInfo", nil)
	return enough(answer, err, 1)
}

func (c *client) largeUnary(ctx context.Context) error {
	answer, err := c.call(ctx, service+"Attend", c.file("large"))
	return enough(answer, err, 300000)
}

func (c *client) pingPong(ctx context.Context) error {
	stream, err := c.stream(ctx)
	for i := 0; i < 4 && err == nil; i++ {
		var answer []byte
		answer, err = c.ask(stream)
		err = enough(answer, err, 10)
	}
	if err != nil {
		return err
	}
	return c.end(stream)
}

// Half-closes the stream, and requires that it ends without further messages.
func (c *client) end(stream grpc.ClientStream) error {
	if err := stream.CloseSend(); err != nil {
		return err
	}
	var answer []byte
	if err := stream.RecvMsg(&answer); err != io.EOF {
		return fmt.Errorf("the stream ended with %v", err)
	}
	return nil
}

func (c *client) streaming(ctx context.Context) error {
	stream, err := c.stream(ctx)
	if err != nil {
		return err
	}
	const count = 50
	request := c.file("small")
	for i := 0; i < count; i++ {
		if err := stream.SendMsg(&request); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for i := 0; ; i++ {
		var answer []byte
		if err := stream.RecvMsg(&answer); err == io.EOF && i == count {
			return nil
		} else if err != nil {
			return fmt.Errorf("after %d answers: %v", i, err)
		}
	}
}

func (c *client) emptyStream(ctx context.Context) error {
	stream, err := c.stream(ctx)
	if err != nil {
		return err
	}
	return c.end(stream)
}

func (c *client) cancelAfterBegin(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.stream(ctx)
	cancel()
	if err == nil {
		var answer []byte
		err = stream.RecvMsg(&answer)
	}
	return wants(err, codes.Canceled, "")
}

func (c *client) cancelAfterFirstResponse(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.stream(ctx)
	if err != nil {
		return err
	}
	if _, err = c.ask(stream); err != nil {
		return err
	}
	cancel()
	var answer []byte
	return wants(stream.RecvMsg(&answer), codes.Canceled, "")
}

func (c *client) timeoutOnSleepingServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	stream, err := c.stream(ctx)
	if err == nil {
		var answer []byte
		err = stream.RecvMsg(&answer)
	}
	return wants(err, codes.DeadlineExceeded, "")
}

func (c *client) statusCodeAndMessage(ctx context.Context) error {
	_, err := c.call(ctx, service+"Attend", c.file("refused"))
	return wants(err, codes.InvalidArgument, "softcap is -1")
}

func (c *client) specialStatusMessage(ctx context.Context) error {
	_, err := c.call(ctx, service+"Attend", c.file("special"))
	return wants(err, codes.InvalidArgument, string(c.file("special-text")))
}

func (c *client) unimplementedMethod(ctx context.Context) error {
	_, err := c.call(ctx, service+"NoSuchMethod", nil)
	return wants(err, codes.Unimplemented, "NoSuchMethod")
}

func (c *client) unimplementedService(ctx context.Context) error {
	_, err := c.call(ctx, "/no.such.Service/Method", nil)
	return wants(err, codes.Unimplemented, "no.such.Service")
}

func (c *client) customMetadata(ctx context.Context) error {
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", trace,
		"x-grpc-test-echo-trailing-bin", "\xab\xab\xab")
	var header metadata.MD
	answer, err := c.call(ctx, service+"Attend", c.file("small"), grpc.Header(&header))
	if err := enough(answer, err, 10); err != nil {
		return err
	}
	if !bytes.Contains([]byte(strings.Join(header.Get("traceparent"), " ")), []byte(trace[:35])) {
		return fmt.Errorf("the answer has %v", header)
	}
	return nil
}

func (c *client) manyCalls(ctx context.Context) error {
	for i := 0; i < 3000; i++ {
		if err := c.emptyUnary(ctx); err != nil {
			return fmt.Errorf("after %d calls: %v", i, err)
		}
	}
	return nil
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		panic(err)
	}
	c := &client{connection, os.Args[2]}
	for _, each := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"empty_unary", c.emptyUnary}, {"large_unary", c.largeUnary}, {"ping_pong", c.pingPong},
		{"streaming", c.streaming}, {"empty_stream", c.emptyStream},
		{"cancel_after_begin", c.cancelAfterBegin},
		{"cancel_after_first_response", c.cancelAfterFirstResponse},
		{"timeout_on_sleeping_server", c.timeoutOnSleepingServer},
		{"status_code_and_message", c.statusCodeAndMessage},
		{"special_status_message", c.specialStatusMessage},
		{"unimplemented_method", c.unimplementedMethod},
		{"unimplemented_service", c.unimplementedService},
		{"custom_metadata", c.customMetadata},
		{"many_calls", c.manyCalls},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if err := each.run(ctx); err != nil {
			fmt.Printf("failed %s: %v\n", each.name, err)
		} else {
			fmt.Printf("ok %s\n", each.name)
		}
		cancel()
	}
}
