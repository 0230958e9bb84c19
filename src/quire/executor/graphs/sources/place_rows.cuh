  // Places a step's rows behind the right drafts of the step before. `memory` holds the step's inputs, for the
  // rows' latest places; from memory[memory[BEHIND]] on stand five integers for each row (see `RowsBehind`), then
  // texts. sampled: tokens of the step before; guesses: what it guessed. A thread takes a row.
  // found [2, MAX_ROWS]: by how many tokens each row begins earlier, and its token.
  const int row = threadIdx.x, count = *rows;
  if (row >= count) return;
  const int* own = memory + memory[BEHIND] + 5 * row;
  const int* texts = memory + memory[BEHIND] + 5 * count;
  const int first = own[0], drafts = own[1], ahead = own[3], run = own[4];
  const int* drafted = texts + own[2];
  int right = 0;
  while (right < drafts && sampled[first + right] == drafted[right]) right++;
  const int back = drafts - right;
  int token = ahead == GIVEN ? memory[row] : -1 - ahead;
  if (ahead == 0) token = sampled[first + right];
  if (ahead > 0) token = run < 0 ? guesses[ahead - 2 - run] : texts[run + right + ahead];
  memory[row] = token;
  memory[POSITIONS + row] -= back;
  found[row] = back;
  found[MAX_ROWS + row] = token;
  constexpr int groups[GROUPS][4] = {PLACES};
  for (int group = 0; group < GROUPS; group++) {
    int* visible = memory + groups[group][2] + 2 * row;
    int* tile = memory + groups[group][3] + 6 * row;
    const int key = visible[1] - back, low = visible[0] > back ? visible[0] - back : 0;
    memory[groups[group][0] + row] = memory[TABLE + tile[4] + key / BLOCK];
    memory[groups[group][1] + row] = key % BLOCK;
    visible[0] = tile[2] = low;
    visible[1] = key;
    tile[3] = key + 1;
    tile[5] -= back;
  }
