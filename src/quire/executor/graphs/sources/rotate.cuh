  // Rotates heads by the positions of rows: PAIRS pairs of elements, which are neighbours or, without
  // NEIGHBOURS, PAIRS apart. Other elements stay. A thread takes two. y [T, HEADS, DIM].
  const int i = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y;
  wait_for_others();
  if (row >= *rows || i >= HEADS * (DIM / 2)) return;
  const int head = i / (DIM / 2), p = i % (DIM / 2);
  const int first = p >= PAIRS || NEIGHBOURS ? 2 * p : p, second = p >= PAIRS || NEIGHBOURS ? 2 * p + 1 : p + PAIRS;
  const auto* from = x + (size_t)row * X_ROW + head * X_HEAD;
  float a = number(from[first]), b = number(from[second]);
  if (p < PAIRS) {
    const float cosine = cosines[(size_t)row * PAIRS + p], sine = sines[(size_t)row * PAIRS + p];
    const float turned = a * cosine - b * sine;
    b = a * sine + b * cosine;
    a = turned;
  }
  auto* to = y + ((size_t)row * HEADS + head) * DIM;
  put(to[first], a);
  put(to[second], b);
