// SPDX-License-Identifier: Apache-2.0

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/**
 * gRPC's interop cases that apply, with gRPC for Java: Interop ADDRESS FOLDER. The messages are
 * files in the folder. Prints "ok CASE" or "failed CASE: WHY" for each case.
 */
public final class Interop {
  private static final String SERVICE = "attend.v1.AttentionService/";
  private static final long PATIENCE_MS = 30_000;
  private static final String TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

  private final Channel channel;
  private final Path folder;

  private Interop(Channel channel, Path folder) {
    this.channel = channel;
    this.folder = folder;
  }

  private interface Case {
    void run() throws Exception;
  }

  /** Passes messages through as bytes. */
  private static final class Raw implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] message) {
      return new ByteArrayInputStream(message);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }
  }

  private static MethodDescriptor<byte[], byte[]> method(String name, MethodType type) {
    return MethodDescriptor.newBuilder(new Raw(), new Raw()).setType(type)
        .setFullMethodName(name).build();
  }

  /** An open AttendStream. The queue gets each answer's bytes, and the Status at the end. */
  private static final class Stream implements StreamObserver<byte[]> {
    private final BlockingQueue<Object> came = new LinkedBlockingQueue<>();
    private final ClientCallStreamObserver<byte[]> requests;

    Stream(Channel channel, long timeoutMs) {
      CallOptions options =
          CallOptions.DEFAULT.withDeadlineAfter(timeoutMs, TimeUnit.MILLISECONDS);
      requests = (ClientCallStreamObserver<byte[]>) ClientCalls.asyncBidiStreamingCall(
          channel.newCall(method(SERVICE + "AttendStream", MethodType.BIDI_STREAMING), options),
          this);
    }

    @Override
    public void onNext(byte[] answer) {
      came.add(answer);
    }

    @Override
    public void onError(Throwable error) {
      came.add(Status.fromThrowable(error));
    }

    @Override
    public void onCompleted() {
      came.add(Status.OK);
    }

    private Object next() throws InterruptedException {
      Object next = came.poll(2 * PATIENCE_MS, TimeUnit.MILLISECONDS);
      check(next != null, "nothing came");
      return next;
    }

    void wantAnswer() throws InterruptedException {
      Object next = next();
      check(next instanceof byte[], "no answer, but " + next);
      atLeast((byte[]) next, 10);
    }

    void wantEnd(Status.Code code) throws InterruptedException {
      Object next = next();
      check(next instanceof Status && ((Status) next).getCode() == code,
          next + " instead of an end with " + code);
    }
  }

  private static void check(boolean good, String why) {
    if (!good) {
      throw new AssertionError(why);
    }
  }

  private static void atLeast(byte[] answer, int size) {
    check(answer.length >= size, answer.length + " bytes came, " + size + " were wanted");
  }

  private byte[] file(String name) throws IOException {
    return Files.readAllBytes(folder.resolve(name));
  }

  private byte[] call(Channel on, String path, byte[] request) {
    CallOptions options =
        CallOptions.DEFAULT.withDeadlineAfter(PATIENCE_MS, TimeUnit.MILLISECONDS);
    return ClientCalls.blockingUnaryCall(on, method(path, MethodType.UNARY), options, request);
  }

  private void wantRefusal(String path, byte[] request, Status.Code code, String text) {
    Status status = Status.OK;
    try {
      call(channel, path, request);
    } catch (RuntimeException e) {
      status = Status.fromThrowable(e);
    }
    check(status.getCode() == code && status.getDescription().contains(text),
        status + " is no " + code + " with " + text);
  }

  private void pingPong() throws Exception {
    Stream stream = new Stream(channel, PATIENCE_MS);
    for (int i = 0; i < 4; i++) {
      stream.requests.onNext(file("small"));
      stream.wantAnswer();
    }
    stream.requests.onCompleted();
    stream.wantEnd(Status.Code.OK);
  }

  private void stream(int count) throws Exception {
    Stream stream = new Stream(channel, PATIENCE_MS);
    for (int i = 0; i < count; i++) {
      stream.requests.onNext(file("small"));
    }
    stream.requests.onCompleted();
    for (int i = 0; i < count; i++) {
      stream.wantAnswer();
    }
    stream.wantEnd(Status.Code.OK);
  }

  private void cancelAfter(int answers) throws Exception {
    Stream stream = new Stream(channel, PATIENCE_MS);
    for (int i = 0; i < answers; i++) {
      stream.requests.onNext(file("small"));
      stream.wantAnswer();
    }
    stream.requests.cancel("enough", null);
    stream.wantEnd(Status.Code.CANCELLED);
  }

  private void customMetadata() throws Exception {
    Metadata.Key<String> trace =
        Metadata.Key.of("traceparent", Metadata.ASCII_STRING_MARSHALLER);
    Metadata sent = new Metadata();
    sent.put(trace, TRACE);
    sent.put(Metadata.Key.of("x-grpc-test-echo-trailing-bin", Metadata.BINARY_BYTE_MARSHALLER),
        new byte[] {(byte) 0xab, (byte) 0xab, (byte) 0xab});
    AtomicReference<Metadata> headers = new AtomicReference<>();
    Channel with = ClientInterceptors.intercept(channel,
        MetadataUtils.newAttachHeadersInterceptor(sent),
        MetadataUtils.newCaptureMetadataInterceptor(headers, new AtomicReference<>()));
    atLeast(call(with, SERVICE + "Attend", file("small")), 10);
    String came = headers.get().get(trace);
    check(came != null && came.startsWith(TRACE.substring(0, 35)), "the answer has " + came);
  }

  private Map<String, Case> cases() {
    Map<String, Case> cases = new LinkedHashMap<>();
    cases.put("empty_unary",
        () -> atLeast(call(channel, SERVICE + "GetServerInfo", new byte[0]), 1));
    cases.put("large_unary",
        () -> atLeast(call(channel, SERVICE + "Attend", file("large")), 300_000));
    cases.put("ping_pong", this::pingPong);
    cases.put("streaming", () -> stream(50));
    cases.put("empty_stream", () -> stream(0));
    cases.put("cancel_after_begin", () -> cancelAfter(0));
    cases.put("cancel_after_first_response", () -> cancelAfter(1));
    cases.put("timeout_on_sleeping_server",
        () -> new Stream(channel, 50).wantEnd(Status.Code.DEADLINE_EXCEEDED));
    cases.put("status_code_and_message", () -> wantRefusal(SERVICE + "Attend", file("refused"),
        Status.Code.INVALID_ARGUMENT, "softcap is -1"));
    cases.put("special_status_message", () -> wantRefusal(SERVICE + "Attend", file("special"),
        Status.Code.INVALID_ARGUMENT, Files.readString(folder.resolve("special-text"))));
    cases.put("unimplemented_method", () -> wantRefusal(SERVICE + "NoSuchMethod", new byte[0],
        Status.Code.UNIMPLEMENTED, "NoSuchMethod"));
    cases.put("unimplemented_service", () -> wantRefusal("no.such.Service/Method", new byte[0],
        Status.Code.UNIMPLEMENTED, "no.such.Service"));
    cases.put("custom_metadata", this::customMetadata);
    cases.put("many_calls", () -> {
      for (int i = 0; i < 3000; i++) {
        atLeast(call(channel, SERVICE + "GetServerInfo", new byte[0]), 1);
      }
    });
    return cases;
  }

  public static void main(String[] args) {
    ManagedChannel channel = NettyChannelBuilder.forTarget(args[0]).usePlaintext()
        .maxInboundMessageSize(Integer.MAX_VALUE).build();
    new Interop(channel, Path.of(args[1])).cases().forEach((name, each) -> {
      try {
        each.run();
        System.out.println("ok " + name);
      } catch (Exception | AssertionError e) {
        System.out.println("failed " + name + ": " + e);
      }
    });
    channel.shutdownNow();
  }
}
